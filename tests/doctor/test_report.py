"""Gathering the facts, querying torch, and the report."""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cpulaunch.doctor.facts import Swap, gather_facts, read_bundled_openmp, read_swap
from cpulaunch.doctor.report import CHECKS, doctor_report, run_checks
from cpulaunch.doctor.torch_report import (
    REPORT_PROGRAM,
    BrokenTorch,
    ProgramResult,
    read_oneccl_problem,
    read_torch_report,
    run_program,
)
from cpulaunch.probe import Root, probe_host
from cpulaunch.records.host import Library, Torch
from cpulaunch.records.request import WorkerPython
from tests import json_output
from tests.doctor.facts import TORCH, facts, machine
from tests.roots import RootSpec, write_root

TORCH_JSON = {
    "version": "2.13.0+cpu",
    "mkl": True,
    "onednn": True,
    "openmp": True,
    "capability": "AVX512",
    "threads": 4,
    "openmp_files": ["/env/torch/lib/libgomp.so.1"],
}
PYTHON = WorkerPython(path=sys.executable, origin="default", reason="cpulaunch's own environment")


def runner_with(result):
    return lambda argv, environ: result


def report_from(result):
    return read_torch_report("/env/bin/python", {}, run=runner_with(result))


def test_torch_reports_its_build():
    assert (
        report_from(ProgramResult(exit_code=0, stdout="a banner of a library\n" + json.dumps(TORCH_JSON) + "\n"))
        == TORCH
    )


def test_torch_is_absent():
    assert report_from(ProgramResult(exit_code=0, stdout='{"absent": true}\n')) is None


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (
            ProgramResult(exit_code=1, stderr="Traceback ...\nOSError: libtorch_cpu.so: truncated\n"),
            "OSError: libtorch_cpu.so",
        ),
        (ProgramResult(exit_code=-11), "killed by signal 11"),
        (ProgramResult(exit_code=3), "ended with exit code 3"),
        (
            ProgramResult(exit_code=None, stderr="torch did not answer within 120 s"),
            "torch did not answer within 120 s",
        ),
        (ProgramResult(exit_code=2, stderr="no Python: " + "x" * 9999), f"no Python: {'x' * 289} ..."),
        (ProgramResult(exit_code=0, stdout=""), "could not be parsed"),
        (ProgramResult(exit_code=0, stdout="garbage"), "could not be parsed"),
        (ProgramResult(exit_code=0, stdout="[1]"), "could not be parsed"),
        (ProgramResult(exit_code=0, stdout='{"version": "2"}'), "could not be parsed"),
        (ProgramResult(exit_code=0, stdout=json.dumps(TORCH_JSON | {"threads": "many"})), "could not be parsed"),
    ],
)
def test_torch_is_broken(result, reason):
    report = report_from(result)
    assert isinstance(report, BrokenTorch)
    assert reason in report.reason


def test_the_named_interpreter_is_run_in_the_users_environment():
    calls = []

    def run(argv, environ):
        calls.append((argv, environ))
        return ProgramResult(exit_code=0, stdout='{"absent": true}')

    read_torch_report("/env/bin/python", {"A": "1"}, run=run)
    assert calls == [(["/env/bin/python", "-c", REPORT_PROGRAM], {"A": "1"})]


def test_a_failing_import_of_torch_is_reported_by_the_real_program(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: file too short')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert read_torch_report(sys.executable, environ, run=run_program) == BrokenTorch(
        reason="OSError: libtorch_cpu.so: file too short"
    )


def test_a_torch_py_in_the_current_folder_is_not_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(9)\n")
    done = subprocess.run([sys.executable, "-S", "-c", REPORT_PROGRAM], cwd=tmp_path, capture_output=True, check=False)
    assert json.loads(done.stdout) == {"absent": True}


@pytest.mark.parametrize("path", ["{0}/x:", ":{0}/x", "."])
def test_a_torch_py_in_the_current_folder_is_not_torch_where_pythonpath_has_an_empty_entry(tmp_path, monkeypatch, path):
    """Nor is a sitecustomize.py there imported, as it is by a Python that has just started, before any program."""
    venv.create(tmp_path / "env", symlinks=True)  # Without packages.
    for name in ("torch", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)\n")
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "PYTHONPATH": path.format(tmp_path)}
    assert read_torch_report(str(tmp_path / "env/bin/python"), environ, run=run_program) is None


def test_an_interpreter_that_cannot_be_started(tmp_path):
    report = read_torch_report(str(tmp_path / "python"), {}, run=run_program)
    assert report == BrokenTorch(reason=f"{tmp_path}/python cannot be started: No such file or directory")


def test_a_captured_machine_is_checked_without_facts_of_this_one(tmp_path):
    root = Root(str(write_root(tmp_path, RootSpec(sockets=2))))

    def run(argv, environ):
        raise AssertionError("the torch of a captured machine must not be run")

    report = doctor_report(probe_host(root), root=root, python=PYTHON, environ={"OMP_DYNAMIC": "true"}, run=run)
    by_name = {name: finding for name, finding in report.findings}
    for name in ("torch", "torch's OpenMP", "/dev/shm", "environment", "memory policy"):
        assert by_name[name].status == "skipped", name
        assert by_name[name].found
    assert by_name["NUMA balancing"].status == "advice"
    assert report.exit_code == 0


def test_swap_of_a_root(tmp_path):
    (tmp_path / "proc").mkdir()
    meminfo = tmp_path / "proc" / "meminfo"
    root = Root(str(tmp_path))
    assert read_swap(root) is None
    meminfo.write_text(f"SwapTotal: {'9' * 5000} kB\nSwapFree: \u00b2 kB\n", encoding="utf-8")  # As captured.
    assert read_swap(root) is None
    meminfo.write_text("MemTotal: 1024 kB\nSwapTotal:       2048 kB\nSwapFree:        1024 kB\n")
    assert read_swap(root) == Swap(total_bytes=2 << 20, free_bytes=1 << 20)


def test_wheels_with_a_runtime_of_their_own(tmp_path):
    packages = tmp_path / "env" / "site-packages"
    for name in ("scikit_learn.libs/libgomp-a34b.so.1.0.0", "torch.libs/libgomp-b.so.1", "numpy.libs/libopenblas.so"):
        (packages / name).parent.mkdir(parents=True)
        (packages / name).touch()
    host = machine(torch=Torch(version="2", path="/env/site-packages/torch"))
    assert read_bundled_openmp(Root(str(tmp_path)), host) == (
        ("scikit_learn.libs", "/env/site-packages/scikit_learn.libs/libgomp-a34b.so.1.0.0"),
    )
    assert read_bundled_openmp(Root(str(tmp_path)), machine(torch=None)) == ()


def test_the_report_as_json():
    report = run_checks(facts(torch=BrokenTorch(reason="OSError: x"), environ={"OMP_DYNAMIC": "1"}, swap=None))
    data = json_output.read("doctor", json.dumps(report.as_json()))
    assert (data["schema"], data["problems"], data["advice"]) == (1, 2, 0)
    assert {check["check"] for check in data["checks"]} == set(CHECKS)
    assert data["checks"][1] == {
        "check": "torch",
        "status": "problem",
        "found": "OSError: x",
        "why": "`import torch` fails: no program that needs it can start",
        "fix": "pip install torch --index-url https://download.pytorch.org/whl/cpu --force-reinstall",
    }
    assert report.exit_code == 1


def test_the_report_as_text():
    lines = run_checks(facts(machine(libraries=()))).as_text(width=80, color=False).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("advice  allocator"))
    assert lines[at] == "advice  allocator        only the C library's allocator"
    assert lines[at + 1].startswith("        why: tcmalloc and jemalloc reuse")
    assert "        fix: apt-get install libtcmalloc-minimal4" in lines
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "no problems, 2 suggestions"
    assert not any("\x1b" in line for line in lines)


def test_escape_sequences_in_names_are_shown_as_text():
    library = Library(kind="allocator", name="tcmalloc", path="/\x1b]0;owned\x07/t.so", untrusted="/\x9b31m")
    text = run_checks(facts(machine(libraries=(library,)))).as_text(width=80, color=False)
    assert text.replace("\n", "").isprintable()
    assert r"/\x1b]0;owned\x07/t.so is not preloaded" in text


def test_colours_are_on_the_first_word_only():
    text = run_checks(facts()).as_text(width=80, color=True)
    assert text.startswith("\x1b[32mOK      \x1b[0mPython ")
    assert text.count("\x1b[32m") == text.count("\x1b[0m") == len(CHECKS)


def test_this_machine():
    root = Root("/")
    host = probe_host(root, interpreter=sys.executable)
    report = doctor_report(host, root=root, python=PYTHON, environ=dict(os.environ))
    assert {name for name, _ in report.findings} == set(CHECKS)
    json_output.checked("doctor", report.as_json())
    assert all(finding.found for _, finding in report.findings)


def test_facts_of_this_machine():
    root = Root("/")
    given = gather_facts(
        probe_host(root), root=root, python=PYTHON, environ={"A": "1"}, run=runner_with(ProgramResult(exit_code=1))
    )
    assert (given.live, given.environ) == (True, {"A": "1"})
    assert isinstance(given.torch, BrokenTorch)
    assert given.shm is None or given.shm.total_bytes >= given.shm.free_bytes


@pytest.mark.torch
def test_the_torch_of_this_environment():
    from importlib import metadata

    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        pytest.skip("torch is not installed beside pytest")
    report = read_torch_report(sys.executable, dict(os.environ), run=run_program)
    assert (report.version.split("+")[0], report.openmp) == (version.split("+")[0], True)
    assert report.threads >= 1
    assert report.capability


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (ProgramResult(exit_code=0, stderr="a warning"), ""),
        (
            ProgramResult(exit_code=1, stderr="oneCCL cannot be loaded: libhwloc.so.15\n"),
            "oneCCL cannot be loaded: libhwloc.so.15",
        ),
        (ProgramResult(exit_code=-11), "killed by signal 11"),
    ],
)
def test_a_program_isolated_from_the_current_folder_loads_oneccl(result: ProgramResult, problem: str) -> None:
    started: list[Sequence[str]] = []

    def run(argv: Sequence[str], environ: Mapping[str, str]) -> ProgramResult:
        started.append(argv)
        return result

    assert read_oneccl_problem("/env/bin/python", {}, run=run) == problem
    assert started[0][:2] == ["/env/bin/python", "-I"]


def test_a_missing_oneccl_is_a_reason_and_an_installed_one_is_loaded() -> None:
    problem = read_oneccl_problem(sys.executable, dict(os.environ), run=run_program)
    assert problem == "" if Path(sys.prefix, "lib/libccl.so.2").exists() else "oneCCL is not installed" in problem
