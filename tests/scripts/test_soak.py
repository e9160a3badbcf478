"""scripts/soak: what it counts as growth, what it finds left over, and a short run of it."""

import random
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

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
    assert not soak.grown([1, 2, 3], 0)


def test_processes_and_files_that_are_left_are_found(soak: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(soak, "LEFT_AFTER_SECONDS", 0.0)
    monkeypatch.setenv(soak.MARK, "test")
    (tmp_path / "cpulaunch-1").mkdir()
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.delenv(soak.MARK)
    try:
        left = soak.left_over("test", tmp_path, soak._shared_files())
    finally:
        process.kill()
        process.wait()
    assert left == [f"process {process.pid} sleep 60", "file cpulaunch-1 in TMPDIR"]
    (tmp_path / "cpulaunch-1").rmdir()
    assert soak.left_over("test", tmp_path, soak._shared_files()) == []


@pytest.mark.slow
def test_a_short_soak_finds_nothing() -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.4", "--seed", "7"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "left over: 0" in run.stdout
