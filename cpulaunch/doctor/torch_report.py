"""Facts that the worker's torch reports about itself, from a program run by the worker's interpreter."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cpulaunch
from cpulaunch.system.files.paths import without_relative_folders
from cpulaunch.system.interrupts import interruptible

SECONDS = 120.0
"""A cold `import torch` from a network file system took 40 s (ecmwf/anemoi-core issue 1327)."""

LONGEST_LINE = 300

REPORT_PROGRAM = """\
import os, sys
sys.path[:] = [folder for folder in sys.path if os.path.isabs(folder)]  # not the current folder's json.py or torch.py
import json
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    print(json.dumps({"absent": True}))
    sys.exit()
try:
    maps = open("/proc/self/maps", errors="replace").read()
except OSError:
    maps = ""
files = {line.split(None, 5)[5].strip() for line in maps.splitlines() if line.count("/")}
names = ("libgomp", "libiomp5", "libomp")
print(json.dumps({
    "version": str(torch.__version__),
    "mkl": torch.backends.mkl.is_available(),
    "onednn": torch.backends.mkldnn.is_available(),
    "openmp": torch.backends.openmp.is_available(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "threads": torch.get_num_threads(),
    "openmp_files": sorted(name for name in files if name.rsplit("/", 1)[-1].startswith(names)),
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Exit code and output of a program; `exit_code` None: it could not be started or did not end in time."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""


Runner = Callable[[Sequence[str], Mapping[str, str]], ProgramResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch reports about itself."""

    version: str
    mkl: bool
    onednn: bool
    openmp: bool
    capability: str
    threads: int
    openmp_files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenTorch:
    """A torch that cannot be imported, and the last line of the error."""

    reason: str


def run_program(argv: Sequence[str], environ: Mapping[str, str]) -> ProgramResult:
    """The result of a program. Effect: starts it and waits at most SECONDS for its end."""
    try:
        with interruptible():
            done = subprocess.run(
                list(argv),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return ProgramResult(exit_code=None, stderr=f"no answer within {SECONDS:g} s")
    except OSError as error:
        return ProgramResult(exit_code=None, stderr=f"{argv[0]} cannot be started: {error.strerror}")
    return ProgramResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def read_torch_report(interpreter: str, environ: Mapping[str, str], *, run: Runner) -> TorchFacts | BrokenTorch | None:
    """What the torch of an interpreter reports; None if the interpreter has no torch."""
    result = run([interpreter, "-c", REPORT_PROGRAM], without_relative_folders(environ))
    if result.exit_code != 0:
        return BrokenTorch(reason=_last_line(result))
    try:
        # Imports may print too: the report is the last line.
        report = json.loads(result.stdout.strip().splitlines()[-1])
        return None if report.get("absent") is True else _facts(report)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError):
        return BrokenTorch(reason="torch's report could not be parsed")


LOAD_PROGRAM = """\
import sys
sys.path.append(sys.argv[1])
from cpulaunch.worker.ccl.oneccl import library
from cpulaunch.worker.ccl.wire.errors import CclError
try:
    library.version()
except CclError as error:
    sys.exit(str(error).splitlines()[0])
"""
"""Loads oneCCL as a rank does: with the libraries that it needs, which its files do not name completely."""


def read_oneccl_problem(interpreter: str, environ: Mapping[str, str], *, run: Runner) -> str:
    """Why the interpreter cannot load oneCCL; empty if it can. Effect: runs it, isolated from the current folder."""
    package = os.path.dirname(os.path.abspath(cpulaunch.__file__))
    result = run([interpreter, "-I", "-c", LOAD_PROGRAM, os.path.dirname(package)], environ)
    return "" if result.exit_code == 0 else _last_line(result)


def _facts(report: Mapping[str, Any]) -> TorchFacts:
    return TorchFacts(
        version=str(report["version"]),
        mkl=bool(report["mkl"]),
        onednn=bool(report["onednn"]),
        openmp=bool(report["openmp"]),
        capability=str(report["capability"]),
        threads=int(report["threads"]),
        openmp_files=tuple(str(name) for name in report["openmp_files"]),
    )


def _last_line(result: ProgramResult) -> str:
    """The last line of stderr, which for an exception is its type and message, or how the program ended."""
    lines = result.stderr.strip().splitlines()
    if lines:
        last = lines[-1].strip()
        return last if len(last) <= LONGEST_LINE else f"{last[:LONGEST_LINE]} ..."
    if result.exit_code is not None and result.exit_code < 0:
        return f"killed by signal {-result.exit_code}"
    return f"ended with exit code {result.exit_code}"
