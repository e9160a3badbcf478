"""What a worker reports when it exits, and its warnings."""

import os
import sys

import pytest

from cpulaunch.records.torch_settings import TorchSettings, encode
from cpulaunch.system.process_snapshot import openmp_kind
from tests.worker.applying import case, events, run_cases, run_python

ALLOWED = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LOAD_SECOND = """
    import ctypes, glob, shutil, tempfile
    (bundled,) = glob.glob(os.path.dirname(torch.__file__) + "/lib/libgomp*.so*")
    copy = os.path.join(tempfile.mkdtemp(), {name!r})
    shutil.copy(bundled, copy)
    ctypes.CDLL(copy)
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/x/libgomp-a34b3233.so.1.0.0", "gnu"),
        ("/x/libgomp.so.1", "gnu"),
        ("/x/libiomp5.so", "intel"),
        ("/x/libomp.so", "llvm"),
        ("/x/libompd.so", None),
        ("/x/libcomp.so", None),
        ("/x/libm.so.6", None),
    ],
)
def test_openmp_runtimes_are_recognized_by_file_name(path, kind):
    assert openmp_kind(path) == kind


CASES = {
    "no warning": case("", threads=2),
    "fewer threads": case("torch.set_num_threads(1)", threads=2),
    "two kinds": case(LOAD_SECOND.format(name="libiomp5.so")),
    "two copies": case(LOAD_SECOND.format(name="libgomp-1234.so.1")),
    "one preloaded": case(LOAD_SECOND.format(name="libiomp5.so"), env={"LD_PRELOAD": "/x/libm.so.6:/x/libiomp5.so"}),
    "too few CPUs": case("", threads=len(ALLOWED) + 1),
    "too few CPUs, pinned": case("", threads=len(ALLOWED) + 1, env={"OMP_PROC_BIND": "close"}),
}
WARNINGS = {
    "fewer threads": "the program set torch to 1 thread; the plan has 2",
    "two kinds": "several OpenMP runtimes in one process: ",
    "too few CPUs": f"threads share {len(ALLOWED)} CPU",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endings")
    cases = {}
    for name, given in CASES.items():
        (folder / name).touch()
        cases[name] = given | {"env": given["env"] | {"CPULAUNCH_EVENTS": str(folder / name)}}
    return {name: (outcome, events(folder / name)) for name, outcome in run_cases(cases, folder).items()}


@linux
@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_a_warning_is_printed_once_and_reported(outcomes, name):
    outcome, reported = outcomes[name]
    assert outcome.code == 0, outcome.err
    assert len(outcome.err.splitlines()) == (name in WARNINGS)
    assert WARNINGS.get(name, "") in outcome.err
    warnings = [event["text"] for event in reported if event["event"] == "warning"]
    assert len(warnings) == (name in WARNINGS or name == "two copies")
    assert all(WARNINGS.get(name, "several OpenMP runtimes") in text for text in warnings)


@linux
@pytest.mark.torch
@pytest.mark.parametrize("name", ["two kinds", "two copies"])
def test_of_several_runtimes_the_report_names_the_one_that_torch_uses(outcomes, name):
    (live,) = [event for event in outcomes[name][1] if event["event"] == "live"]
    assert len(live["openmp"]) == 2
    assert live["openmp_path"] in live["openmp"]
    assert "/torch/lib/" in live["openmp_path"]
    assert live["openmp_runtime"] == "gnu"


@linux
@pytest.mark.torch
def test_the_worker_reports_how_it_ran_and_its_forked_children_do_not(tmp_path):
    program, file = tmp_path / "program.py", tmp_path / "events"
    program.write_text("import os, sys, torch\nif os.fork(): os.wait()\nprint(os.getpid())\nsys.exit(4)\n")
    file.touch()
    environment = {"CPULAUNCH_WORKER": encode(TorchSettings(threads=1)), "CPULAUNCH_EVENTS": str(file)}
    outcome = run_python(program, env=environment)
    assert outcome.code == 4
    (live,) = events(file, "live")
    assert str(live["pid"]) == outcome.out.split()[-1]
    assert {mask["cpus"] for mask in live["threads"]}
    assert live["peak_memory_bytes"] > 0
    assert live["openmp_runtime"] == openmp_kind(live["openmp_path"])
    assert live["openmp"] == [live["openmp_path"]]


@pytest.mark.torch
def test_without_the_variable_nothing_is_imported_and_nothing_changes():
    code = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('cpulaunch')))"
    outcome = run_python("-c", code)
    assert outcome.err == ""
    assert outcome.out.strip() == "['cpulaunch', 'cpulaunch.worker', 'cpulaunch.worker.autoload']"
