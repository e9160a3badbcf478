"""What the worker says of itself as it ends: how it was placed, and what it ran with against the plan."""

from __future__ import annotations

import atexit
import os

from cpulaunch.records.torch_settings import EVENTS_VARIABLE, TorchSettings
from cpulaunch.worker.reporting.degradation import degraded, warned
from cpulaunch.worker.reporting.events import report_event
from cpulaunch.worker.reporting.process_identity import is_worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def install(settings: TorchSettings) -> None:
    """Effect: as this process ends, the launch learns how it ran; not in its children, forked or spawned."""
    if is_worker():
        atexit.register(_finish, settings, os.getpid(), os.environ.get("LD_PRELOAD", ""))


def _finish(settings: TorchSettings, process: int, preload: str) -> None:
    if os.getpid() != process:  # A forked child that ends like its parent.
        return
    try:
        _tell_live(settings, preload)
    except Exception as error:  # noqa: BLE001 - the program has ended well
        degraded(settings, "report", f"{type(error).__name__}: {error}")


def _tell_live(settings: TorchSettings, preload: str) -> None:
    from cpulaunch.system.process_snapshot import snapshot

    listens = bool(os.environ.get(EVENTS_VARIABLE))
    live = snapshot(pages=listens)
    if listens:
        report_event("live", **live)
    _check_openmp(settings, live["openmp"], preload)


def _check_openmp(settings: TorchSettings, loaded: Sequence[str], preload: str) -> None:
    """Effect: a warning if two OpenMP runtimes ran side by side; copies of one kind are told to the report only.

    A preloaded runtime answers for all others, which then do nothing. Source: ld.so(8); LLVM OpenMP reference (it has
    libgomp's entry points too); pytorch issues 44282 and 166087.
    """
    kinds = {kind for path in loaded if (kind := openmp_kind(path))}
    if len(loaded) < 2 or any(openmp_kind(path) for path in preload.replace(":", " ").split()):
        return
    text = f"several OpenMP runtimes in one process, each with threads of its own: {', '.join(loaded)}"
    if len(kinds) > 1:
        warned(settings, f"{text} (--openmp intel or llvm preloads one for all)")
    else:
        report_event("warning", text=text)


def openmp_kind(path: str) -> str | None:
    """Whose OpenMP runtime a library is, None if it is none."""
    name = os.path.basename(path)
    kinds = {"libgomp": "GNU", "libiomp5": "Intel", "libomp": "LLVM", "libomp5": "LLVM"}
    return kinds.get(name.partition(".so")[0].partition("-")[0])
