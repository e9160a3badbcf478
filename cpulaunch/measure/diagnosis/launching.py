"""One launch of a program whose steps are measured, and the figures that its processes leave."""

from __future__ import annotations

import sys

from cpulaunch.launch.process.exec_spec import NOT_INHERITED
from cpulaunch.launch.process.program import child_environ
from cpulaunch.measure.child_process import run_child
from cpulaunch.measure.diagnosis.folder import FiguresReader, read_failure, read_states
from cpulaunch.measure.diagnosis.progress import Measurement
from cpulaunch.measure.last_message import last_message
from cpulaunch.records.record import record, replace
from cpulaunch.records.torch_settings import DIAGNOSIS_VARIABLE, encode_request
from cpulaunch.records.torch_settings import VARIABLE as SETTINGS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.measure.child_process import ChildResult, ChildSetup
    from cpulaunch.measure.diagnosis.figures import ProcessFigures
    from cpulaunch.records.torch_settings import DiagnosisRequest

NO_SETTINGS = "{}"
"""The plugin's settings of a launch without cpulaunch: none but those of the diagnosis."""


@record
class DiagnosedLaunch:
    """What a launch left. `states`: how far its processes came. `failure`: how it failed, if it did.

    `unmeasured`: why a process could not be measured, though nothing was wrong with the program. `ignored`: files of
    figures that are malformed, or beyond what is read of a launch.
    """

    figures: tuple[ProcessFigures, ...] = ()
    states: frozenset[str] = frozenset()
    failure: str | None = None
    unmeasured: str | None = None
    ignored: int = 0


def diagnose_plain(
    command: tuple[str, ...],
    request: DiagnosisRequest,
    setup: ChildSetup,
    *,
    search_path: str | None,
    limit: float,
) -> DiagnosedLaunch:
    """The launch by this command alone. `search_path`: PYTHONPATH with the plugin, for a Python without it.

    Effect: launches the program, and waits until all that it started has ended. Raises: KeyboardInterrupt.
    """
    changes = [*NOT_INHERITED, (SETTINGS_VARIABLE, NO_SETTINGS), (DIAGNOSIS_VARIABLE, encode_request(request))]
    if search_path is not None:
        changes.append(("PYTHONPATH", search_path))
    environ = child_environ(setup.environ, tuple(changes))
    return _finished(command, request, replace(setup, environ=environ), limit)


def diagnose_launched(
    words: tuple[str, ...], request: DiagnosisRequest, setup: ChildSetup, *, python: str, limit: float
) -> DiagnosedLaunch:
    """The launch by cpulaunch with these options and this program.

    Effect: launches the program, and waits until all that it started has ended. Raises: KeyboardInterrupt.
    """
    chosen = () if any(word.partition("=")[0] == "--python" for word in words) else ("--python", python)
    command = (sys.executable, "-P", "-m", "cpulaunch", "run", *chosen, *words)
    environ = child_environ(setup.environ, ((DIAGNOSIS_VARIABLE, encode_request(request)),))
    return _finished(command, request, replace(setup, environ=environ), limit, guarded=True)


def _finished(
    command: tuple[str, ...], request: DiagnosisRequest, setup: ChildSetup, limit: float, *, guarded: bool = False
) -> DiagnosedLaunch:
    enough = None if request.to_end else Measurement(request.folder).is_complete
    child = run_child(command, setup, limit_seconds=limit, enough=enough, guarded=guarded)
    reader = FiguresReader(request.folder)
    return DiagnosedLaunch(
        figures=reader.read(),
        states=read_states(request.folder),
        failure=None if child.enough else _failure(child, limit),
        unmeasured=read_failure(request.folder),
        ignored=reader.ignored,
    )


def _failure(child: ChildResult, limit: float) -> str | None:
    """How a program failed that ended by itself or ran past the limit; None if it ended well."""
    if child.exit_code is None:
        return f"it was still running after {limit:.3g} s"
    if not child.exit_code:
        return None
    last = last_message(child.stderr_tail)
    return f"it exited with code {child.exit_code}{f': {last}' if last else ''}"
