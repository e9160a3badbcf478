"""scripts/soak: what it counts as growth, what it finds left over, and a short run of it."""

import random
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from cpulaunch.cli.arguments import parse_command_line

SOAK = Path(__file__).parents[2] / "scripts" / "soak"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    loader = SourceFileLoader("soak", str(SOAK))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_growth_is_seen_below_what_varies(soak: ModuleType) -> None:
    chance = random.Random(4)
    steady = [10 + chance.randrange(5) for _ in range(80)]
    assert not soak.grown(steady, 0)
    assert soak.grown([value + place // 10 for place, value in enumerate(steady)], 0)
    assert not soak.grown([14 - 4 * (place in (25, 33)) for place in range(80)], 0), "no sample between two attempts"
    assert not soak.grown([1, 2, 3], 0)
    assert not soak.grown([27, 27, 29, 29], 0), "too few to tell"


def test_processes_and_files_that_are_left_are_found(soak: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(soak, "LEFT_AFTER_SECONDS", 0.0)
    monkeypatch.setenv(soak.MARK, "test")
    (tmp_path / "cpulaunch-1").mkdir()
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.delenv(soak.MARK)
    try:
        left = soak.left_over("test", tmp_path, soak.outside())
    finally:
        process.kill()
        process.wait()
    assert left == [f"process {process.pid} sleep 60", "file cpulaunch-1 in TMPDIR"]
    (tmp_path / "cpulaunch-1").rmdir()
    assert soak.left_over("test", tmp_path, soak.outside()) == []


def test_a_launch_that_ends_at_once_and_ranks_that_are_not_restarted_are_no_success(soak: ModuleType) -> None:
    assert soak.wrong_end("by itself", 2) == ["exit code 2"]
    assert soak.wrong_end("by itself", 3) == soak.wrong_end("SIGTERM", 143) == []
    assert soak.stalled([])
    assert soak.stalled([4, 8, 8, 8])
    assert not soak.stalled([4, 8, 8, 10])
    findings = soak.Findings(descriptors=[1] * 8, threads=[1] * 8, resident_bytes=[1] * 8, workers=[2] * 8)
    assert not soak.report(findings)
    findings.workers[-1] = 4
    assert soak.report(findings)


def test_launches_of_every_kind_have_options_that_exist(soak: ModuleType) -> None:
    for options in soak.KINDS.values():
        parse_command_line([*options, "worker.py"], interpreter="python")


def test_what_a_launch_leaves_outside_of_its_folder_is_seen(soak: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(soak, "LEFT_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(soak, "own_cgroup", lambda: str(tmp_path))
    folder = tmp_path / "tmp"
    folder.mkdir()
    before = soak.outside()
    (tmp_path / "cpulaunch-1").mkdir()
    assert soak.left_over("none", folder, before) == ["cgroup cpulaunch-1"]


def test_the_figures_of_all_processes_count(soak: ModuleType, monkeypatch) -> None:
    """Growth of the smaller one of two processes is growth."""

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid
            self.num_fds, self.num_threads = (lambda: pid), (lambda: 1)
            self.memory_info = lambda: type("Memory", (), {"rss": 5})

    monkeypatch.setattr(soak, "launchers", lambda value: [Process(10), Process(3)])
    monkeypatch.setattr(soak, "marked", lambda value: [Process(10), Process(3), Process(20)])
    findings = soak.Findings()
    soak.sample("long", findings)
    assert (findings.descriptors, findings.threads, findings.resident_bytes) == ([13], [2], [10])
    assert findings.workers == [1]


def test_a_launcher_that_has_not_started_its_workers_is_no_sample(soak: ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(soak, "marked", lambda value: [])
    findings = soak.Findings()
    soak.sample("long", findings)
    assert findings.descriptors == []


@pytest.mark.slow
def test_a_short_soak_finds_nothing() -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.4", "--seed", "7"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "left over: 0" in run.stdout
