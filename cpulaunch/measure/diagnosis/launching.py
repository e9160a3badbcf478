"""One launch of a program whose steps are measured, and the figures that its processes leave."""

from __future__ import annotations

import json
import os
import sys

from cpulaunch.launch.process.exec_spec import NOT_INHERITED
from cpulaunch.launch.process.program import child_environ
from cpulaunch.measure.child_process import run_child
from cpulaunch.measure.diagnosis.figures import read_figures
from cpulaunch.measure.execution import plain_command
from cpulaunch.records.errors import escaped
from cpulaunch.records.record import record, replace
from cpulaunch.records.torch_settings import DIAGNOSIS_VARIABLE, FETCHES, FIGURES, TRACES, encode_request
from cpulaunch.records.torch_settings import VARIABLE as SETTINGS_VARIABLE
from cpulaunch.system.files.reading import read_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.measure.child_process import ChildSetup
    from cpulaunch.measure.diagnosis.figures import ProcessFigures
    from cpulaunch.records.torch_settings import DiagnosisRequest

MAX_BYTES = 1 << 22
MAX_PROCESSES = 256
MAX_MESSAGE = 300
NO_SETTINGS = "{}"
"""The plugin's settings of a launch without cpulaunch: none but those of the diagnosis."""


@record
class DiagnosedLaunch:
    """What a launch left. `failure`: how it failed, if it left no figures."""

    figures: tuple[ProcessFigures, ...] = ()
    failure: str | None = None


def diagnose_plain(
    program: tuple[str, ...],
    request: DiagnosisRequest,
    setup: ChildSetup,
    *,
    python: str,
    search_path: str | None,
    limit: float,
) -> DiagnosedLaunch:
    """The launch by Python alone. `search_path`: PYTHONPATH with the plugin, for a Python without it.

    Effect: launches the program, and waits until all that it started has ended. Raises: KeyboardInterrupt.
    """
    changes = [*NOT_INHERITED, (SETTINGS_VARIABLE, NO_SETTINGS), (DIAGNOSIS_VARIABLE, encode_request(request))]
    if search_path is not None:
        changes.append(("PYTHONPATH", search_path))
    environ = child_environ(setup.environ, tuple(changes))
    return _finished(plain_command(program, python), request, replace(setup, environ=environ), limit)


def diagnose_launched(
    words: tuple[str, ...], request: DiagnosisRequest, setup: ChildSetup, *, python: str, limit: float
) -> DiagnosedLaunch:
    """The launch by cpulaunch with these options and this program.

    Effect: launches the program, and waits until all that it started has ended. Raises: KeyboardInterrupt.
    """
    chosen = () if any(word.partition("=")[0] == "--python" for word in words) else ("--python", python)
    command = (sys.executable, "-P", "-m", "cpulaunch", "run", *chosen, *words)
    environ = child_environ(setup.environ, ((DIAGNOSIS_VARIABLE, encode_request(request)),))
    return _finished(command, request, replace(setup, environ=environ), limit)


def _finished(command: tuple[str, ...], request: DiagnosisRequest, setup: ChildSetup, limit: float) -> DiagnosedLaunch:
    child = run_child(command, setup, limit_seconds=limit)
    figures = read_folder(request.folder)
    if figures:
        return DiagnosedLaunch(figures=figures)
    if child.exit_code is None:
        return DiagnosedLaunch(failure=f"it was still running after {limit:.3g} s")
    lines = [line.strip() for line in child.stderr_tail.decode(errors="replace").splitlines() if line.strip()]
    last = escaped(lines[-1])[:MAX_MESSAGE] if lines and child.exit_code else ""
    if child.exit_code:
        return DiagnosedLaunch(failure=f"it exited with code {child.exit_code}{f': {last}' if last else ''}")
    return DiagnosedLaunch(failure=None)


def read_folder(folder: str) -> tuple[ProcessFigures, ...]:
    """The figures of all processes, with those of their DataLoader workers."""
    names = sorted(os.listdir(folder))
    found = []
    for name in [name for name in names if name.startswith(FIGURES)][:MAX_PROCESSES]:
        figures = read_figures(_text(f"{folder}/{name}"))
        if figures is not None:
            found.append(figures)
    fetches: dict[str, float] = {}
    for name in [name for name in names if name.startswith(FETCHES)][:MAX_PROCESSES]:
        for key, value in _numbers(_text(f"{folder}/{name}")).items():
            fetches[key] = fetches.get(key, 0.0) + value
    if not fetches:
        return tuple(found)
    return tuple(replace(each, fetches=fetches) if each.loader_workers else each for each in found)


def read_trace(folder: str, pid: int) -> bytes | None:
    """The profiler's trace of a process; None if it wrote none."""
    try:
        return read_start(f"{folder}/{TRACES}{pid}.json", max_bytes=1 << 30)
    except OSError:
        return None


def _text(path: str) -> str:
    try:
        return read_start(path, max_bytes=MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _numbers(text: str) -> dict[str, float]:
    try:
        data = json.loads(text)
        return {str(name): float(value) for name, value in data.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
