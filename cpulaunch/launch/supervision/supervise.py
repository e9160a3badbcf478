"""The supervisor: starts the workers, sleeps in the kernel until something happens, and ends what it started."""

from __future__ import annotations

import os
import select
import signal
import time

from cpulaunch.launch.output.pump import Pump
from cpulaunch.launch.output.routing import OutputRouting, close_output_routing
from cpulaunch.launch.output.sink import SinkError
from cpulaunch.launch.process.descriptors import StdioFds
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.process.processes import (
    ExitQueue,
    group_exists,
    kill_children,
    own_children,
    reap,
    reap_measured,
    signal_group,
    signal_process,
)
from cpulaunch.launch.process.spawn import Inherited, confirm_executed, spawn
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult, oom_kills
from cpulaunch.launch.supervision.state_machine import (
    Event,
    GroupGone,
    LauncherGone,
    OrphansFound,
    OutputFailed,
    SignalArrived,
    SignalGroups,
    SupervisionState,
    TimePassed,
    WorkerEnded,
    step,
    with_worker,
)
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import record
from cpulaunch.system.signals import ENDING, SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType
    from typing import TypeAlias

    from cpulaunch.launch.monitor.watch import Watch
    from cpulaunch.records.plan import JobPlan

MAX_POLL_MILLISECONDS = float((1 << 31) - 1)
"""The timeout of poll(2) is an int."""

Clock: TypeAlias = "Callable[[], float]"


@record
class SupervisorOptions:
    """What a launch is supervised under. `control` is the guard's pipe; `memory_events` a cgroup's file, if any."""

    inherited: Inherited
    grace_seconds: float
    control: int
    memory_events: str | None = None
    watch: Watch | None = None
    ending_signals: frozenset[int] = ENDING


def ending_signals(job: JobPlan) -> frozenset[int]:
    """The numbers of --signals-to-handle, and SIGINT: Ctrl-C always ends a job, as a terminal has no other way."""
    numbers = (getattr(signal, name, None) for name in (*job.signals, "SIGINT"))
    return frozenset(int(number) for number in numbers if number is not None)


class Supervisor:
    """The workers' life: a context in which they are started and run, and after which none is left."""

    def __init__(self, routing: OutputRouting, options: SupervisorOptions, *, clock: Clock, calendar: Clock) -> None:
        self._inherited = options.inherited
        self._control = options.control
        self._watch = options.watch
        self._clock = clock
        self._calendar = calendar
        self.state = SupervisionState(
            grace_seconds=options.grace_seconds, groups=frozenset(), ending_signals=options.ending_signals
        )
        self.output_error: SinkError | None = None
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        """Per worker: its exit code, or minus the signal that killed it."""
        self.ended_at: dict[int, float] = {}
        """Per worker that has ended, the first first: seconds since the epoch."""
        self._worker_of: dict[int, int] = {}
        self._exits = ExitQueue()
        self._all_gone = False
        self._impatient = False
        self._poll = select.poll()
        self._wakeup, self._wakeup_end = _wake_on_child()
        self._poll.register(self._wakeup, select.POLLIN)
        self._poll.register(self._control, select.POLLIN)
        if self._watch is not None:
            self._watch.register(self._poll)
        streams = [stream for streams in routing.streams for stream in streams]
        self._pump = Pump(self._poll, streams=streams, sinks=routing.sinks)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Effect: whatever happened, no worker and no descendant of one is left, nor any descriptor made here."""
        for group in self.state.groups:
            signal_group(self.pids[group], SIGKILL)
        kill_children()
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup)
        os.close(self._wakeup_end)
        self._exits.close()
        if self._watch is not None:
            self._watch.close()

    def start(self, specs: Sequence[ExecSpec], stdio: Sequence[StdioFds]) -> None:
        """Effect: every worker's program runs. Raises: LaunchError or NotExecutableError."""
        started = []
        for spec, its_stdio in zip(specs, stdio, strict=True):
            one = spawn(spec, stdio=its_stdio, inherited=self._inherited)
            started.append(one)
            self._exits.add(one.pid)
            self.pids[spec.worker] = one.pid
            self._worker_of[one.pid] = spec.worker
            if self._watch is not None:
                self._watch.worker_started(spec.worker, one.pid)
            self.state = with_worker(self.state, spec.worker)
        for spec, one in zip(specs, started, strict=True):
            confirm_executed(spec, one)

    def run(self) -> None:
        """Effect: returns when all workers and all they started have ended and their output is written."""
        self._reap()
        while not (self._all_gone and self._output_done()):
            self._settle()
            self._wait()

    def _wait(self) -> None:
        """Effect: sleeps until the next event or deadline, and deals with it."""
        watching = None if self._watch is None else self._watch.deadline
        deadlines = [at for at in (self.state.next_deadline, self._pump.deadline, watching) if at is not None]
        wait = max(0.0, min(deadlines) - self._clock()) * 1000 + 1 if deadlines else None
        timeout = None if wait is None else min(wait, MAX_POLL_MILLISECONDS)
        ready = self._poll.poll(timeout)
        for fd, _ in ready:
            if fd == self._control:
                self._listen()
            elif self._watch is not None and self._watch.owns(fd):
                self._watch.serve()
            elif fd != self._wakeup:
                self._serve(fd)
        if any(fd == self._wakeup for fd, _ in ready):
            _empty(self._wakeup)
            self._reap()
        if self._watch is not None:
            self._watch.run_due()
        due = self.state.next_deadline
        if due is not None and due <= self._clock():
            self._happened(TimePassed())
            self._look_at_groups()

    def _listen(self) -> None:
        """Effect: signals that arrived at the guard are acted on; its end ends all."""
        numbers = os.read(self._control, 4096)
        if not numbers:
            self._poll.unregister(self._control)
            self._impatient = True
            self._happened(LauncherGone())
        for number in numbers:
            # With the workers gone, only a slow reader of their output keeps us.
            self._impatient = self._impatient or (self._all_gone and number in self.state.ending_signals)
            self._happened(SignalArrived(number))
        self._look_at_groups()

    def _serve(self, fd: int) -> None:
        try:
            self._pump.serve(fd)
        except SinkError as error:
            self._output_failed(error)

    def _settle(self) -> None:
        try:
            self._pump.update_polling(self._clock())
        except SinkError as error:
            self._output_failed(error)

    def _output_failed(self, error: SinkError) -> None:
        if self.output_error is None:
            self.output_error = error
            self._happened(OutputFailed())

    def _happened(self, event: Event) -> None:
        self.state, actions = step(self.state, event, self._clock())
        for action in actions:
            if isinstance(action, SignalGroups):
                for index in action.workers:
                    signal_group(self.pids[index], action.number)
            else:
                for pid in action.pids:
                    signal_process(pid, action.number)

    def _reap(self) -> None:
        """Effect: every ended child is noticed, the first that ended first, then groups and orphans are looked at."""
        while ended := self._exits.first():
            index = self._worker_of.get(ended.pid)
            if index is not None:
                self.statuses[index] = ended.status
                self.ended_at[index] = self._calendar()
                # Its group is told to end while the unreaped leader still keeps the number from being reused.
                self._happened(WorkerEnded(index, failed=ended.status != 0))
                if ended.status < 0:
                    _tidy_up_after(ended.pid)
            if index is None or self._watch is None:
                reap(ended)
            else:
                self._watch.worker_ended(index, reap_measured(ended))
        self._look_at_groups()

    def _look_at_groups(self) -> None:
        """Effect: groups that have ended are noticed. A killed one is not waited for.

        Its last member may be a zombie whose parent, an orphan, never waits for it.
        """
        for index in sorted(self.state.groups & self.statuses.keys()):
            if self.state.is_killed(index) or not group_exists(self.pids[index]):
                self._happened(GroupGone(index))
        if not self.state.groups:
            self._look_for_orphans()

    def _look_for_orphans(self) -> None:
        orphans = own_children()
        self._all_gone = not orphans
        if orphans:
            self._happened(OrphansFound(orphans))

    def _output_done(self) -> bool:
        """Whether all output is written, or nobody wants to wait for it."""
        try:
            self._pump.drain()
            if self._pump.has_unread_output and not self._impatient:
                return False
            self._pump.finish()
        except SinkError as error:
            self._output_failed(error)
        return self._pump.all_written or self._impatient


def _tidy_up_after(pid: int) -> None:
    from cpulaunch.system.shm_cleanup import remove_shared_memory

    remove_shared_memory(pid)


def _wake_on_child() -> tuple[int, int]:
    """A pipe whose first end becomes readable when a child ends. Effect: SIGCHLD is handled and unblocked."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)

    def noted(number: int, frame: FrameType | None) -> None:
        """The wake-up descriptor has it."""

    signal.signal(signal.SIGCHLD, noted)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return read, write


def _empty(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def supervise(specs: Sequence[ExecSpec], routing: OutputRouting, options: SupervisorOptions) -> LaunchResult:
    """How the workers ended, all of them and all they started.

    Effect: no descriptor of the wiring is left. Raises: LaunchError if a worker could not be started.
    """
    kills_before = _oom_kills(options.memory_events)
    calendar = time.time  # noqa: TID251 - here the seam is closed
    with Supervisor(routing, options, clock=time.monotonic, calendar=calendar) as supervisor:
        supervisor.start(specs, routing.stdio)
        supervisor.run()
    close_output_routing(routing)
    oom_kills = _more(kills_before, _oom_kills(options.memory_events))
    return _result(supervisor, routing, watch=options.watch, oom_kills=oom_kills)


def _lost_output(error: SinkError) -> LaunchError:
    return LaunchError(
        "output of the workers cannot be written; they were ended",
        value=error.filename,
        source=error.strerror,
        hint="free space there, or choose another --log-dir",
    )


def _result(
    supervisor: Supervisor, routing: OutputRouting, *, watch: Watch | None, oom_kills: int | None
) -> LaunchResult:
    workers = tuple(
        WorkerResult(
            index=index,
            pid=supervisor.pids[index],
            exit_code=status if status >= 0 else None,
            signal=-status if status < 0 else None,
            last_lines=streams[-1].last_lines(),
            log=log,
            metric=metric,
            ended_at=supervisor.ended_at[index],
            observation=None if watch is None else watch.observation(index),
        )
        for (index, status), streams, log, metric in zip(
            sorted(supervisor.statuses.items()), routing.streams, routing.logs, routing.metrics, strict=True
        )
    )
    state = supervisor.state
    code = 0
    if state.first_failure is not None:
        code = next(worker.status for worker in workers if worker.index == state.first_failure)
    elif state.ended_by is not None:
        code = 128 + state.ended_by
    output_error = None if supervisor.output_error is None else _lost_output(supervisor.output_error)
    return LaunchResult(
        exit_code=code if output_error is None else output_error.exit_code,
        output_error=output_error,
        end_requested=state.end_requested,
        host=os.uname().nodename,
        workers=workers,
        first_failure=state.first_failure,
        ended_by=state.ended_by,
        oom_kills=oom_kills,
        wall_seconds=None if watch is None else watch.wall_seconds(),
    )


def _oom_kills(memory_events: str | None) -> int | None:
    if memory_events is None:
        return None
    try:
        with open(memory_events) as file:
            return oom_kills(file.read())
    except (OSError, ValueError):
        return None


def _more(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
