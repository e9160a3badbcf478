"""Runs a launch plan: the entry point of this package."""

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
    from collections.abc import Callable, Mapping, Sequence

    from cpulaunch.launch.monitor.watch import Watch
    from cpulaunch.launch.supervision.result import LaunchResult


def launch(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    memory_events: str | None = None,
    notify: Notify,
    on_started: Callable[[], None] | None = None,
) -> LaunchResult:
    """How the workers ended. The call takes this process over, so it is the last thing a program does.

    Effect: with one worker and no logs, report or the like, this process becomes the worker and nothing returns.
    Otherwise the result returns in a forked child, the supervisor. The calling process stays as its guard, forwards
    signals to it and ends with its exit code. It calls `on_started` once all workers execute their programs, and before
    where it has to wait: these are the moments to import what comes after the launch.
    Raises: LaunchError, NotFoundError or NotExecutableError: before any worker starts if the cause is known by then,
    else after all workers have been ended.
    """
    if not hasattr(os, "fork"):
        raise LaunchError("cannot start workers", value=sys.platform, hint="run cpulaunch on Linux, macOS or in WSL")
    if not plan.replaces_launcher:
        from cpulaunch.launch.process.descriptors import open_standard_descriptors

        open_standard_descriptors()  # What this process opens and keeps from here on has higher numbers.
    if plan.job is not None and plan.job.engine != "scheduler":
        return _launch_job(plan, environ, memory_events=memory_events, notify=notify, on_started=on_started)
    specs = prepare_exec_specs(plan, environ, notify=notify)
    if plan.replaces_launcher:
        replace_this_process(specs[0])
    if plan.launch.watched:
        return _launch_watched(plan, specs, environ, memory_events=memory_events, notify=notify, on_started=on_started)
    return _launch_supervised(
        plan, specs, directory=None, memory_events=memory_events, notify=notify, on_started=on_started
    )


def _launch_job(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    *,
    memory_events: str | None,
    notify: Notify,
    on_started: Callable[[], None] | None,
) -> LaunchResult:
    """How the ranks of a job ended."""
    if plan.job is not None and plan.job.engine == "elastic":
        from cpulaunch.launch.hosts.engine import launch_hosts

        return launch_hosts(plan, environ=environ, memory_events=memory_events, notify=notify, on_started=on_started)
    from cpulaunch.launch.ranks.engine import launch_ranks

    return launch_ranks(plan, environ=environ, memory_events=memory_events, notify=notify, on_started=on_started)


def _launch_watched(
    plan: LaunchPlan,
    specs: Sequence[ExecSpec],
    environ: Mapping[str, str],
    *,
    memory_events: str | None,
    notify: Notify,
    on_started: Callable[[], None] | None,
) -> LaunchResult:
    """How the workers ended that report through a run directory. Effect: it does not exist afterwards."""
    from cpulaunch.launch.process.run_directory import choose_private_path, remove_run_directory, with_event_files

    directory = choose_private_path(environ)
    try:
        reporting = with_event_files(specs, directory)
        return _launch_supervised(
            plan, reporting, directory=directory, memory_events=memory_events, notify=notify, on_started=on_started
        )
    finally:
        remove_run_directory(directory)


def _launch_supervised(
    plan: LaunchPlan,
    specs: Sequence[ExecSpec],
    *,
    directory: str | None,
    memory_events: str | None,
    notify: Notify,
    on_started: Callable[[], None] | None,
) -> LaunchResult:
    """How the workers ended, in a process of its own. A launch that becomes the worker never imports this.

    Effect: makes the run's directory: after the fork, because then there always is a process to remove it.
    """
    from cpulaunch.launch.process.descriptors import fd_shortage_error
    from cpulaunch.launch.process.guard import fork_supervisor

    try:
        grace_seconds = plan.launch.grace_seconds
        link = fork_supervisor(
            notify,
            workers=len(specs),
            grace_seconds=grace_seconds,
            directory=directory,
            asks=True,
            shows_output=plan.launch.shows_output,
        )
        if directory is not None:
            from cpulaunch.launch.process.run_directory import make_event_files, make_private_path

            make_private_path(directory)
            make_event_files(directory, [spec.worker for spec in specs])
        # Imported after the fork, while the kernel moves the supervisor to its cgroup. A pipe that the guards held open
        # too would not close with the supervisor's end.
        from cpulaunch.launch.output.routing import open_output_routing
        from cpulaunch.launch.supervision.options import SupervisorOptions
        from cpulaunch.launch.supervision.supervise import supervise

        routing = open_output_routing(plan)
        options = SupervisorOptions(
            inherited=link.inherited,
            grace_seconds=grace_seconds,
            control=link.control,
            guards=link.guards,
            memory_events=memory_events,
            notify=notify,
            watch=None if directory is None else _watch(plan, directory),
            cgroup=link.cgroup,
            adopts_orphans=link.adopts_orphans,
            on_started=on_started,
        )
        return supervise(specs, routing, options)
    except OSError as error:
        raise fd_shortage_error(error) from None


def _watch(plan: LaunchPlan, directory: str) -> Watch:
    import time

    from cpulaunch.launch.monitor.watch import Watch

    return Watch(plan, directory, clock=time.monotonic)
