"""One launch under a supervisor, and its result."""

from __future__ import annotations

import gc
import os
import time

from cpulaunch.launch.output.routing import OutputRouting, close_output_routing
from cpulaunch.launch.output.sink import SinkError
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult, oom_kills
from cpulaunch.launch.supervision.supervisor import Supervisor
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import replace
from cpulaunch.system.files.reading import read_proc
from cpulaunch.system.signals import SIGINT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpulaunch.launch.monitor.watch import Watch
    from cpulaunch.launch.supervision.options import SupervisorOptions
    from cpulaunch.launch.supervision.state_machine import SupervisionState
    from cpulaunch.records.errors import CpulaunchError


def supervise(specs: Sequence[ExecSpec], routing: OutputRouting, options: SupervisorOptions) -> LaunchResult:
    """How the workers ended, once they and all their descendants have.

    Effect: runs them, closes the descriptors of the routing, and collects garbage from now on.
    Raises: LaunchError if a worker cannot be started.
    """
    gc.freeze()  # What exists by now stays until the end.
    gc.enable()
    kills_before = _read_oom_kills(options.memory_events)
    wall_clock = time.time  # noqa: TID251 - the clocks are injected from here on
    with Supervisor(routing, options, clock=time.monotonic, wall_clock=wall_clock) as supervisor:
        supervisor.start(specs, routing.stdio)
        supervisor.run()
    kills = _read_oom_kills(options.memory_events)
    new_kills = None if kills is None or kills_before is None else kills - kills_before
    result = _launch_result(supervisor, routing, watch=options.watch, oom_kills=new_kills)
    if result.exit_code:  # A message follows.
        routing.end_line()
    close_output_routing(routing)
    return replace(result, inside_line=routing.stderr is not None and routing.stderr.is_inside_line)


def _launch_result(
    supervisor: Supervisor, routing: OutputRouting, *, watch: Watch | None, oom_kills: int | None
) -> LaunchResult:
    state = supervisor.state
    workers = tuple(
        WorkerResult(
            index=index,
            pid=supervisor.pids[index],
            exit_code=status if status >= 0 else None,
            signal=-status if status < 0 else None,
            last_lines=streams[-1].last_lines(),
            log=log,
            shown=index in routing.shown,
            metric=metric,
            ended_at=supervisor.ended_at[index],
            observation=None if watch is None else watch.observation(index),
        )
        for (index, status), streams, log, metric in zip(
            sorted(supervisor.statuses.items()), routing.streams, routing.logs, routing.metrics, strict=True
        )
    )
    output_error = None if supervisor.output_error is None else _output_error(supervisor.output_error)
    statuses = {worker.index: worker.status for worker in workers}
    return LaunchResult(
        exit_code=launch_exit_code(state, statuses, output_error),
        output_error=output_error,
        end_requested=state.end_requested,
        paused=supervisor.is_paused,
        host=os.uname().nodename,
        workers=workers,
        first_failure=state.first_failure,
        ended_by=state.ended_by,
        oom_kills=oom_kills,
        started_at=supervisor.started_at,
        wall_seconds=None if watch is None else watch.wall_seconds(),
    )


def launch_exit_code(
    state: SupervisionState, statuses: Mapping[int, int], output_error: CpulaunchError | None = None
) -> int:
    """The launch's exit code, from that of each worker as a shell shows it."""
    if output_error is not None:
        return output_error.exit_code
    if state.first_failure is not None:
        return statuses[state.first_failure]
    if state.ended_by is not None and not _ended_well(state.ended_by, statuses):
        return 128 + state.ended_by
    return 0


def _ended_well(number: int, statuses: Mapping[int, int]) -> bool:
    """Whether all workers ended with 0 although this signal ended the launch: they had finished what they had to.

    After Ctrl-C a shell that runs several commands goes on if a command ends with 0.
    """
    return number != SIGINT and not any(statuses.values())


def _output_error(error: SinkError) -> LaunchError:
    is_file = error.filename not in ("stdout", "stderr")
    return LaunchError(
        "cannot write the workers' output; all workers were terminated",
        value=error.filename,
        source=error.strerror,
        hint=f"free space there, or choose another {'--log-dir' if is_file else 'place to redirect it to'}",
    )


def _read_oom_kills(memory_events: str | None) -> int | None:
    """How often the kernel has killed a process of the cgroup for memory; None if unknown."""
    if memory_events is None:
        return None
    try:
        return oom_kills(read_proc(memory_events).decode(errors="replace"))
    except (OSError, ValueError):
        return None
