"""Calibrations: which processes run, what is remembered and for whom, and which choices follow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpulaunch.cli import collective_timings
from cpulaunch.measure.calibration.cache import decode, encode, read_calibration, write_calibration
from cpulaunch.measure.calibration.calibrate import DisturbanceWatch, RunResult, measure, parse, undisturbed
from cpulaunch.measure.calibration.runs import CalibrationRun, calibration_runs, read_bytes
from cpulaunch.plan.plugin.timings import CollectiveMeasurement, Timing
from cpulaunch.plan.variables.measured import measured_allocator, measured_openmp
from cpulaunch.records.host import (
    Budget,
    Cache,
    Calibration,
    CalibrationFigure,
    CpuInfo,
    Host,
    Library,
    Limits,
    LogicalCpu,
    NumaNode,
    Torch,
)
from cpulaunch.records.record import replace
from tests import json_output
from tests.launch.launching import eventually

ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")
LIBRARIES = (
    Library(kind="allocator", name="tcmalloc", path="/lib/tcmalloc.so"),
    Library(kind="allocator", name="jemalloc", path="/tmp/jemalloc.so", untrusted="others can change it"),
    Library(kind="openmp", name="intel", path="/lib/libiomp5.so"),
)


def machine(*, threads: int = 4, nodes: int = 2) -> Host:
    """A machine of four cores with SMT, the siblings numbered last, its cores dealt to the NUMA nodes in turn."""
    cpus = tuple(LogicalCpu(id=each, core=each % 4, socket=0, numa_node=each % nodes) for each in range(8))
    ids = frozenset(range(8))
    budget = Budget(cpus=ids, threads=threads, limited_by="")
    return Host(
        arch="x86_64",
        cpu=CpuInfo(model_name="a CPU"),
        cpus=cpus,
        limits=Limits(affinity=ids, budget=budget),
        libraries=LIBRARIES,
        torch=Torch(version="2.13.0", path="/torch"),
        numa_nodes=tuple(
            NumaNode(id=node, cpus=frozenset(each.id for each in cpus if each.numa_node == node), memory_bytes=1 << 30)
            for node in range(nodes)
        ),
    )


def figures(kind: str, **values: float) -> Calibration:
    return Calibration(
        date="2026-11-01", figures=tuple(CalibrationFigure(kind, name, value) for name, value in values.items())
    )


def test_each_trusted_library_and_each_numa_node_has_a_run_of_its_own() -> None:
    runs = calibration_runs(machine(), "/lib/dispatch.so")
    assert [(run.words[0], run.preloads, run.words[1:3], run.threads) for run in runs[1:]] == [
        ("fp32=fp32 with MKL dispatch", ("/lib/dispatch.so",), ("0-3", ""), 4),
        ("parallel=intel", ("/lib/libiomp5.so",), ("0-3", ""), 4),
        ("allocation=tcmalloc", ("/lib/tcmalloc.so",), ("0-3", ""), 4),
        ("read=NUMA node 0", (), ("0,2", "0"), 2),
        ("read=NUMA node 1", (), ("1,3", "1"), 2),
    ]
    assert runs[0].preloads == ()


@pytest.mark.parametrize(
    ("caches", "memory", "expected"),
    [
        ((), None, 256 << 20),
        ((Cache(level=3, type="Unified", cpus=frozenset(range(8)), bytes=32 << 20),), None, 256 << 20),
        (
            tuple(Cache(level=3, type="Unified", cpus=frozenset({each}), bytes=96 << 20) for each in range(8)),
            None,
            4 * 4 * 96 << 20,
        ),
        (
            tuple(Cache(level=3, type="Unified", cpus=frozenset({each}), bytes=96 << 20) for each in range(8)),
            2 << 30,
            512 << 20,
        ),
        ((Cache(level=2, type="Instruction", cpus=frozenset(range(8)), bytes=1 << 30),), None, 256 << 20),
    ],
    ids=["unknown", "small", "large", "little memory", "of instructions"],
)
def test_more_memory_is_read_than_the_last_caches_hold(
    caches: tuple[Cache, ...], memory: int | None, expected: int
) -> None:
    host = machine(nodes=1)
    nodes = tuple(replace(each, memory_bytes=64 << 30) for each in host.numa_nodes)
    host = replace(host, caches=caches, numa_nodes=nodes, limits=replace(host.limits, memory_bytes=memory))
    assert read_bytes(host, frozenset(range(4))) == expected
    assert calibration_runs(host, None)[0].words[-1] == str(expected)


def test_what_the_caller_has_set_for_one_program_changes_no_figure() -> None:
    for run in calibration_runs(machine(), None):
        variables = dict(run.variables)
        for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "OMP_PROC_BIND", "GLIBC_TUNABLES"):
            assert variables[name] is None


def test_a_quota_limits_the_threads() -> None:
    runs = calibration_runs(machine(threads=1, nodes=1), None)
    assert {dict(run.variables)["OMP_NUM_THREADS"] for run in runs} == {"1"}
    assert not any(run.numa_node for run in runs)


def test_a_disturbed_process_is_repeated_and_no_other_one() -> None:
    quiet = RunResult(figures=(CalibrationFigure("allocation", "tcmalloc", 3.0),), failures=())
    wrong = RunResult(figures=(CalibrationFigure("allocation", "tcmalloc", 9.0),), failures=(), reasons=("others",))
    for results, starts in (((quiet,), 1), ((wrong, quiet), 2), ((wrong, wrong, quiet), 3), ((wrong,) * 3, 3)):
        left = list(results)
        found = undisturbed(lambda left=left: left.pop(0))  # type: ignore[misc]
        assert (found, len(results) - len(left)) == (results[-1], starts)


def test_what_others_do_meanwhile_is_a_reason() -> None:
    cpus = frozenset(os.sched_getaffinity(0))
    budget = Budget(cpus=cpus, threads=len(cpus), limited_by="")
    watch = DisturbanceWatch(budget)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            eventually(lambda: any("other processes used" in each for each in watch.reasons()), "a reason")
        finally:
            other.kill()


@pytest.mark.parametrize("disturbed", [False, True])
def test_disturbed_times_of_collectives_are_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbed: bool
) -> None:
    times = CollectiveMeasurement(timings=(Timing(1 << 20, 2e-3, 1e-3),), fresh=True)
    monkeypatch.setattr(collective_timings, "_measure", lambda request, plan, environ: times)
    worker = SimpleNamespace(env=(), cpus=frozenset({0}))

    def ask(measure: bool | Callable[[], bool]) -> CollectiveMeasurement | None:
        return collective_timings.collective_measurement(
            machine(),
            None,  # type: ignore[arg-type]
            SimpleNamespace(workers=(worker, worker)),  # type: ignore[arg-type]
            environ={"XDG_CACHE_HOME": str(tmp_path)},
            measure=measure,
            notify=lambda text: None,
        )

    assert ask(lambda: not disturbed) == times
    known = ask(False)
    assert (known is None) is disturbed
    assert known is None or known.timings == times.timings


@pytest.mark.parametrize("disturbed", [False, True])
def test_figures_are_remembered_as_they_were(disturbed: bool) -> None:
    found = Calibration(
        date="2026-11-01",
        figures=(CalibrationFigure("all-reduce", "gloo, 1 MiB", 0.1), CalibrationFigure("products", "a=b", 1 / 3)),
        disturbed=disturbed,
    )
    assert decode(encode(found)) == found


@pytest.mark.parametrize(
    "text", ["", "2026", "2026\tproducts=fp32=nan", "2026\tproducts==1", "2026\tother=fp32=1", "2026\tproducts=fp32=-1"]
)
def test_other_texts_are_no_calibrations(text: str) -> None:
    assert decode(text) is None


def test_a_calibration_is_for_its_machine_and_torch_and_for_no_file_of_others(tmp_path: Path) -> None:
    path = tmp_path / "cache/calibration"
    first, second = machine(), machine(threads=2)
    write_calibration(str(path), first, figures("products", fp32=1.0))
    write_calibration(str(path), second, figures("products", fp32=2.0))
    write_calibration(str(path), first, figures("products", fp32=3.0))
    assert read_calibration(str(path), first) == figures("products", fp32=3.0)
    assert read_calibration(str(path), second) == figures("products", fp32=2.0)
    assert read_calibration(str(path), machine(threads=3)) is None
    path.chmod(0o622)
    assert read_calibration(str(path), first) is None


@pytest.mark.parametrize(
    ("times", "names"),
    [
        ({"gnu": 5.0, "intel": 4.0}, ("intel",)),
        ({"gnu": 4.0, "intel": 4.3}, ("intel",)),
        ({"gnu": 4.0, "intel": 4.5}, ()),
        ({"gnu": 4.0, "llvm": 1.0, "intel": 4.0}, ("intel",)),
    ],
)
def test_the_usual_runtime_stays_unless_it_is_clearly_slower(times: dict[str, float], names: tuple[str, ...]) -> None:
    measured = measured_openmp(figures("parallel operation", **times))
    assert measured is not None
    assert measured[0] == names
    assert "measured here" in measured[1]


@pytest.mark.parametrize(
    ("times", "names"),
    [
        ({"default": 3.0, "tcmalloc": 3.2}, ALLOCATORS),
        ({"default": 3.0, "tcmalloc": 4.0}, ()),
        ({"default": 3.0, "tcmalloc": 3.0, "jemalloc": 1.0}, ("jemalloc", "tcmalloc", "mimalloc")),
    ],
)
def test_the_usual_allocator_stays_unless_it_is_clearly_slower(times: dict[str, float], names: tuple[str, ...]) -> None:
    measured = measured_allocator(figures("allocation", **times), ALLOCATORS)
    assert measured is not None
    assert measured[0] == names


def test_nothing_follows_from_a_disturbed_or_incomplete_measurement() -> None:
    busy = Calibration(date="", figures=figures("allocation", default=1.0, tcmalloc=9.0).figures, disturbed=True)
    assert measured_allocator(busy, ALLOCATORS) is None
    assert measured_allocator(figures("allocation", default=1.0), ALLOCATORS) is None
    assert measured_openmp(figures("parallel operation", gnu=1.0)) is None


@pytest.mark.parametrize("output", ["", "hello", "[1]", '{"figures": [[1]], "failures": []}', '{"figures": 1}'])
def test_an_answer_of_another_form_is_a_failure(output: str) -> None:
    found, failures = parse(output)
    assert found == ()
    assert failures


@pytest.mark.slow
@pytest.mark.torch
def test_calibrate_measures_and_probe_and_plan_show_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "cpulaunch", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True).stdout

    found = json_output.read("calibrate", run("calibrate", "--json"))
    kinds = {each["kind"] for each in found["figures"]}
    assert {"products", "read bandwidth", "allocation", "parallel operation"} <= kinds
    shown = json_output.read("probe", run("probe", "--json"))["calibration"]
    assert shown["figures"] == found["figures"]
    if not found["disturbed"]:
        assert "measured here" in json.dumps(json_output.read("plan", run("plan", "--json", "a.py"))["notes"])


@pytest.mark.torch
@pytest.mark.parametrize(("seconds", "sizes"), [(1.0, {256}), (1e-4, {256, 1536})])
def test_large_products_that_would_take_seconds_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, seconds: float, sizes: set[int]
) -> None:
    """A processor without instructions for bf16 took minutes."""
    pytest.importorskip("torch")
    from cpulaunch.worker.calibration import parts

    made = []
    monkeypatch.setattr(parts, "_times", lambda call: [seconds])
    assert parts._products(made.append, lambda first, second: None) > 0
    assert set(made) == sizes


def test_what_measures_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by an empty or a relative entry of PYTHONPATH."""
    (tmp_path / "torch.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join(["", ".", *filter(os.path.isabs, sys.path)])
    run = CalibrationRun(parts=(("none", "figures"),))
    measure(run, python=sys.executable, environ={**os.environ, "PYTHONPATH": path})
    assert not (tmp_path / "imported").exists()
