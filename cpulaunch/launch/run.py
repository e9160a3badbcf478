"""A plan carried out: the one entry point of this package."""

from __future__ import annotations

import os
import sys

from cpulaunch.launch.process.bind import Notify
from cpulaunch.launch.process.exec_spec import ExecSpec, prepare_exec_specs
from cpulaunch.launch.process.replace import replace_this_process
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import LaunchPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpulaunch.launch.monitor.watch import Watch
    from cpulaunch.launch.supervision.result import LaunchResult


def launch(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    memory_events: str | None = None,
    notify: Notify,
) -> LaunchResult:
    """How the workers ended. It takes this process over, so it is the last thing a program does.

    Effect: with one worker and no logs, report or the like this process becomes the worker and nothing returns.
    Otherwise the result returns in a forked child, the supervisor; the calling process stays as its guard, passes
    signals on, and ends with the exit code of the child.
    Raises: LaunchError, NotFoundError or NotExecutableError, before anything is started where that can be
    known, and with everything ended again where it cannot.
    """
    if not hasattr(os, "fork"):
        raise LaunchError("cannot start workers", value=sys.platform, hint="run cpulaunch on Linux, macOS or in WSL")
    if plan.job is not None and plan.job.engine != "scheduler":
        return _job(plan, environ, memory_events=memory_events, notify=notify)
    specs = prepare_exec_specs(plan, environ, notify=notify)
    if plan.replaces_launcher:
        replace_this_process(specs[0])
    if plan.launch.watched:
        return _watched(plan, specs, environ, memory_events=memory_events, notify=notify)
    return _supervised(plan, specs, directory=None, memory_events=memory_events, notify=notify)


def _job(plan: LaunchPlan, environ: Mapping[str, str], *, memory_events: str | None, notify: Notify) -> LaunchResult:
    """How the ranks of a job ended."""
    if plan.job is not None and plan.job.engine == "elastic":
        from cpulaunch.launch.hosts.engine import launch_hosts

        return launch_hosts(plan, environ=environ, memory_events=memory_events, notify=notify)
    from cpulaunch.launch.ranks.engine import launch_ranks

    return launch_ranks(plan, environ=environ, memory_events=memory_events, notify=notify)


def _watched(
    plan: LaunchPlan,
    specs: Sequence[ExecSpec],
    environ: Mapping[str, str],
    *,
    memory_events: str | None,
    notify: Notify,
) -> LaunchResult:
    """How workers ended that tell this launch about themselves, through a directory which is gone afterwards."""
    from cpulaunch.launch.process.run_directory import (
        make_event_files,
        make_private_directory,
        remove_run_directory,
        with_event_files,
    )

    directory = make_private_directory(environ)
    try:
        make_event_files(directory, [spec.worker for spec in specs])
        telling = with_event_files(specs, directory)
        return _supervised(plan, telling, directory=directory, memory_events=memory_events, notify=notify)
    finally:
        remove_run_directory(directory)


def _supervised(
    plan: LaunchPlan, specs: Sequence[ExecSpec], *, directory: str | None, memory_events: str | None, notify: Notify
) -> LaunchResult:
    """How the workers ended, in a process of its own. A launch that becomes the worker never imports this."""
    from cpulaunch.launch.output.routing import open_output_routing, open_standard_descriptors
    from cpulaunch.launch.process.descriptors import fd_shortage_error, raise_fd_limit
    from cpulaunch.launch.process.guard import become_guarded
    from cpulaunch.launch.process.spawn import Inherited
    from cpulaunch.launch.supervision.supervise import SupervisorOptions, supervise

    open_standard_descriptors()
    descriptor_limit = raise_fd_limit(len(specs))
    try:
        guarded = become_guarded(notify, directory=directory)
        # Opened here and not in the guard, so that pipes close when the supervisor closes them.
        routing = open_output_routing(plan)
        options = SupervisorOptions(
            inherited=Inherited(signal_mask=guarded.signal_mask, descriptor_limit=descriptor_limit),
            grace_seconds=plan.launch.grace_seconds,
            control=guarded.control,
            memory_events=memory_events,
            watch=None if directory is None else _watch(plan, directory, notify=notify),
        )
        _collect_garbage_from_here_on()
        return supervise(specs, routing, options)
    except OSError as error:
        raise fd_shortage_error(error) from None


def _watch(plan: LaunchPlan, directory: str, *, notify: Notify) -> Watch:
    import time

    from cpulaunch.launch.monitor.watch import Watch

    return Watch(plan, directory, clock=time.monotonic, notify=notify)


def _collect_garbage_from_here_on() -> None:
    """Effect: garbage is collected again, except for what exists by now and stays until the end."""
    import gc

    gc.freeze()
    gc.enable()
