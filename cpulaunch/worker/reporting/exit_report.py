"""What the worker reports when it exits: its CPU masks, memory and libraries, and a second OpenMP runtime."""

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
    """Effect: the worker reports how it ran when it exits; its child processes, forked or spawned, do not."""
    if is_worker():
        atexit.register(_report_at_exit, settings, os.getpid(), os.environ.get("LD_PRELOAD", ""))


def _report_at_exit(settings: TorchSettings, process: int, preload: str) -> None:
    if os.getpid() != process:  # A forked child that runs the exit handlers of its parent.
        return
    try:
        _report_live(settings, preload)
    except Exception as error:  # noqa: BLE001 - a failed report must not change the exit code
        degraded(settings, "report", f"{type(error).__name__}: {error}")


def _report_live(settings: TorchSettings, preload: str) -> None:
    from cpulaunch.system.process_snapshot import openmp_facts, snapshot

    has_report = bool(os.environ.get(EVENTS_VARIABLE))
    live = snapshot(pages=has_report)
    if has_report:
        if len(live["openmp"]) > 1:
            from cpulaunch.worker.reporting.openmp import active_runtime

            live |= openmp_facts(active_runtime())
        report_event("live", **live)
        from cpulaunch.worker.reporting.conditions import conditions

        report_event("conditions", **conditions(settings))
    _check_openmp(settings, live["openmp"], preload)


def _check_openmp(settings: TorchSettings, loaded: Sequence[str], preload: str) -> None:
    """Effect: warns of two different OpenMP runtimes in this process; several copies of one go to the report only.

    A preloaded runtime overrides the entry points of all others, so that only it starts threads. Source: ld.so(8); LLVM
    OpenMP reference (it has libgomp's entry points too); pytorch issues 44282 and 166087.
    """
    from cpulaunch.system.process_snapshot import openmp_kind

    kinds = {kind for path in loaded if (kind := openmp_kind(path))}
    if len(loaded) < 2 or any(openmp_kind(path) for path in preload.replace(":", " ").split()):
        return
    text = f"several OpenMP runtimes in one process: {', '.join(loaded)}"
    if len(kinds) > 1:
        warned(settings, f"{text}; --openmp intel or llvm preloads a single one")
    else:
        report_event("warning", text=text)
