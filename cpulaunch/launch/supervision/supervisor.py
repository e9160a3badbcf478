"""The supervisor: starts the workers, sleeps in the kernel until an event or deadline, and ends what it started."""

from __future__ import annotations

import os
import select
from itertools import islice

from cpulaunch.launch.output.pump import NEVER, Pump
from cpulaunch.launch.output.routing import OutputRouting, reopen_logs
from cpulaunch.launch.output.sink import SinkError
from cpulaunch.launch.process.child_watch import ExitQueue, child_wakeup_pipe, drain, wake
from cpulaunch.launch.process.descendants import end_launches, kill_descendants
from cpulaunch.launch.process.descriptors import StdioFds
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.process.processes import (
    continue_guards,
    continue_stopped,
    endable_children,
    group_exists,
    is_refused,
    kill_children,
    reap,
    reap_measured,
    signal_child,
    signal_process,
    signal_workers,
)
from cpulaunch.launch.process.spawn import check_executed, spawn
from cpulaunch.launch.supervision.state_machine import (
    Event,
    GroupGone,
    LauncherGone,
    OrphansFound,
    OutputFailed,
    SignalArrived,
    SignalGroups,
    SignalOrphans,
    SupervisionState,
    TimePassed,
    WorkerEnded,
    step,
    with_worker,
)
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import count_text
from cpulaunch.system.files.shared_memory import SHARED_FOLDER, SharedMemorySearches
from cpulaunch.system.libc import stop_writing
from cpulaunch.system.process_state import catches, has_ended_traced
from cpulaunch.system.signals import OPPOSITES, SIGKILL, SIGTSTP, merged, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import TypeAlias

    from cpulaunch.launch.supervision.options import SupervisorOptions

MAX_POLL_MILLISECONDS = float((1 << 31) - 1)
"""The timeout of poll(2) is an int."""

SIGNALS = frozenset(map(int, signal.valid_signals()))
"""Other numbers in the guard's pipe are its questions, or those of a worker that has a copy of its end."""

MAX_REAPED = 256
"""Ended children that are handled before other events: a worker may make thousands."""
MANY_NAMES = "has too many names to look through: shared memory of killed workers may be left there"
MAX_KILLED = 1 << 16
"""Killed workers and orphans whose shared memory of unusual names is looked for at the end."""

Clock: TypeAlias = "Callable[[], float]"

INTERRUPT_NOTICE_SECONDS = 1.0
"""Most programs end sooner after Ctrl-C, and then nothing has to be said."""
OUTPUT_SECONDS = 0.5
"""How long the readers of ended workers' output may take for the rest of it, once a signal ends the launch."""


class Supervisor:
    """A context in which the workers are started and run, and after which none of them is left."""

    def __init__(self, routing: OutputRouting, options: SupervisorOptions, *, clock: Clock, wall_clock: Clock) -> None:
        self._inherited, self._control, self._guards = options.inherited, options.control, options.guards
        self._watch, self._cgroup, self._ending_seconds = options.watch, options.cgroup, options.ending_seconds
        self._adopts_orphans, self._of_launchers = options.adopts_orphans, options.of_launchers
        self._routing, self._clock, self._wall_clock = routing, clock, wall_clock
        self.state = SupervisionState(
            grace_seconds=options.grace_seconds, groups=frozenset(), ending_signals=options.ending_signals
        )
        self.output_error: SinkError | None = None
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        """By worker: its exit code, or minus the signal that killed it."""
        self.started_at, self.ended_at = wall_clock(), dict[int, float]()
        """Unix time in seconds; of the ends: by worker, in their order."""
        self._killed: set[int] = set()
        self._searches = SharedMemorySearches(wall_clock=wall_clock)
        self._worker_of: dict[int, int] = {}
        self._starting: dict[int, ExecSpec] = {}
        """By the descriptor that says why a worker was not executed: the workers of which that is not known yet."""
        self._exits = ExitQueue(clock)
        self._all_ended = self._guard_is_gone = self.is_paused = False
        self._output_deadline = NEVER
        """When output that is not written yet is abandoned, if all workers have ended."""
        self._notify, self._on_started = routing.between_lines(options.notify, self._fail_output), options.on_started
        self._notice_at: float | None = None
        self._poll, self._urgent = select.poll(), select.poll()
        self._wakeup, self._wakeup_write = child_wakeup_pipe()
        os.set_blocking(self._control, False)
        for fd in (self._wakeup, self._control, self._exits.fd):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)
                self._urgent.register(fd, select.POLLIN)
        if self._watch is not None:
            self._watch.register(self._poll)
        streams = [stream for streams in routing.streams for stream in streams]
        self._pump = Pump(self._poll, streams=streams, sinks=routing.sinks)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Effect: no worker, no descendant of one and no descriptor made here is left, even after an exception."""
        self._signal_workers(self.state.groups, SIGKILL)
        ended = frozenset(pid for pid in self._killed if not signal_process(pid, 0))  # Others may have it now.
        if not kill_children(ended=ended, since=self._searches.since) and self._notify is not None:
            self._notify(f"{SHARED_FOLDER} {MANY_NAMES}")
        if self._cgroup is not None and self._guard_is_gone:
            self._cgroup.remove()
        continue_guards(self._guards)  # A worker may have stopped one, and killed the other.
        signal.set_wakeup_fd(-1)
        for fd in (self._wakeup, self._wakeup_write, *self._starting):
            os.close(fd)
        self._exits.close()
        if self._watch is not None:
            self._watch.close()

    def start(self, specs: Sequence[ExecSpec], stdio: Sequence[StdioFds]) -> None:
        """Effect: every worker is about to execute its program. Raises: LaunchError."""
        if self._cgroup is not None:
            self._cgroup.wait_until_inside(meanwhile=None if self._watch else self._on_started)
        for spec, fds in zip(specs, stdio, strict=True):
            worker = spawn(spec, stdio=fds, inherited=self._inherited)
            self._starting[worker.error_fd] = spec
            self._poll.register(worker.error_fd, select.POLLIN)
            self._exits.add(worker.pid)
            self.pids[spec.worker] = worker.pid
            self._worker_of[worker.pid] = spec.worker
            if self._watch is not None:
                self._watch.worker_started(spec.worker, worker.pid)
            self.state = with_worker(self.state, spec.worker)

    def run(self) -> None:
        """Effect: returns when the workers and all their descendants have ended and their output is written.

        Raises: LaunchError or NotExecutableError if a worker's program does not run.
        """
        self._reap()
        while not (self._all_ended and self._output_done()):
            try:
                self._pump.update_polling(self._clock())
            except SinkError as error:
                self._fail_output(error)
            self._wait()
        if self.state.end_requested:
            stop_writing(self._control)  # The guard asks no longer whether this process still reads.

    def _wait(self) -> None:
        """Effect: sleeps until the next event or deadline, and handles it."""
        ready = self._poll.poll(self._poll_milliseconds())
        for fd, _ in ready:
            self._serve(fd)
            self._handle_urgent()  # After each: to search a part of the output for a metric may take half a second.
        if not ready:
            self._handle_urgent()
        if self._watch is not None:
            self._watch.run_due(self._notify)

    def _serve(self, fd: int) -> None:
        """Effect: handles what this descriptor is ready for; nothing if it is urgent, or closed by now."""
        if self._watch is not None and self._watch.owns(fd):
            self._watch.serve()
        elif fd in self._starting:
            self._confirm_executed(fd)
        elif self._pump.owns(fd):
            self._move_output(fd)

    def _handle_urgent(self) -> None:
        """Effect: handles signals, ends of workers and deadlines that have come."""
        ready = [fd for fd, _ in self._urgent.poll(0)]
        if self._control in ready:
            self._read_control()
        if self._wakeup in ready:
            drain(self._wakeup)
        if self._wakeup in ready or self._exits.fd in ready or _is_due(self._exits.deadline, self._clock()):
            self._reap()
        if _is_due(self._notice_at, self._clock()):
            self._say_what_is_left()
        if _is_due(self.state.next_deadline, self._clock()):
            self._handle(TimePassed())
            self._exits.look()
            self._check_groups()

    def _confirm_executed(self, fd: int, *, ended: bool = False) -> None:
        """Effect: the worker no longer counts as starting if it has executed its program or has `ended`.

        Raises: LaunchError or NotExecutableError.
        """
        if check_executed(self._starting[fd], fd) or ended:
            del self._starting[fd]
            self._poll.unregister(fd)
            os.close(fd)
            if not self._starting and self._on_started is not None:
                self._on_started()

    def _starting_descriptor(self, worker: int) -> int | None:
        """The descriptor that says why the worker was not executed; None if it was."""
        return next((fd for fd, spec in self._starting.items() if spec.worker == worker), None)

    def _say_what_is_left(self) -> None:
        """Effect: says once, some time after Ctrl-C, which workers the launch waits for; nothing if it does not."""
        self._notice_at = None
        seconds = -int((max(self.state.deadlines.values(), default=0.0) - self._clock()) // -1)  # Rounded up.
        if self._notify is None or not self.state.interrupted or self.state.killing or seconds <= 0:
            return
        left = f"{count_text(len(self.state.groups), 'worker')} ({format_cpulist(self.state.groups)})"
        time_left = count_text(seconds, "second")
        self._notify(f"interrupted: waiting up to {time_left} for {left}; Ctrl-C again kills at once")

    def _poll_milliseconds(self) -> float:
        """How long to wait for an event."""
        watch_deadline = None if self._watch is None else self._watch.deadline
        output_deadline = self._output_deadline if self._all_ended else NEVER
        others = (self.state.next_deadline, self._exits.deadline, self._notice_at, self._pump.deadline)
        deadline = min(at for at in (*others, output_deadline, watch_deadline) if at is not None)
        return min(max(0.0, deadline - self._clock()) * 1000 + 1, MAX_POLL_MILLISECONDS)

    def _read_control(self) -> None:
        """Effect: handles the signals that the guard received; ends everything if the guard has died."""
        try:
            numbers = os.read(self._control, 4096)
        except BlockingIOError:  # Another process has read it, where the pipe is not a private one.
            return
        if not numbers:
            self._poll.unregister(self._control)
            self._urgent.unregister(self._control)
            self._guard_is_gone = True
            self._handle(LauncherGone())
        for number in merged(number for number in numbers if number in SIGNALS):
            if number == signal.SIGINT and not self.state.interrupted:
                self._notice_at = self._clock() + INTERRUPT_NOTICE_SECONDS
            if number == signal.SIGUSR1:
                reopen_logs(self._routing)
            if number in OPPOSITES:
                self.is_paused = number == SIGTSTP
            self._handle(SignalArrived(number))
        if not numbers or not self.state.ending_signals.isdisjoint(numbers):
            self._limit_output_time()
        self._exits.look()
        self._check_groups()

    def _limit_output_time(self) -> None:
        """Effect: readers of the output have the workers' grace period for it, and OUTPUT_SECONDS after their end."""
        grace_seconds = 0.0 if self.state.killing else self.state.grace_seconds
        seconds = OUTPUT_SECONDS if self._all_ended else grace_seconds
        self._output_deadline = min(self._output_deadline, self._clock() + seconds)

    def _move_output(self, fd: int) -> None:
        try:
            self._pump.serve(fd)
        except SinkError as error:
            self._fail_output(error)

    def _fail_output(self, error: SinkError) -> None:
        if self.output_error is None:
            self.output_error = error
            self._handle(OutputFailed())

    def _handle(self, event: Event) -> None:
        """Effect: updates the state, and sends the signals that the event calls for."""
        was_killing = self.state.killing
        self.state, actions = step(self.state, event, self._clock())
        for action in actions:
            if isinstance(action, SignalGroups):
                self._signal_workers(action.workers, action.number)
            elif isinstance(action, SignalOrphans):
                for pid in action.pids:
                    signal_child(pid, action.number)
            else:
                kill_descendants()
                if was_killing:  # Else the kernel may end them with the cgroup.
                    self._leave_refused()
        if self.state.killing and not was_killing:
            end_launches(guard_is_gone=self._guard_is_gone)
            if self._cgroup is not None:
                self._cgroup.kill_others()

    def _leave_refused(self) -> None:
        """Effect: a worker that may not be signalled, as it runs as another user, counts as killed and is left."""
        for index in self.state.groups - self.statuses.keys():
            if is_refused(self.pids[index]):
                self._record_end(index, -SIGKILL)
                if self._watch is not None:
                    self._watch.worker_ended(index, None)
                if self._notify is not None:
                    pid = self.pids[index]
                    self._notify(f"worker {index} runs as another user and could not be ended: process {pid} is left")

    def _record_end(self, worker: int, status: int) -> None:
        self.statuses[worker], self.ended_at[worker] = status, self._wall_clock()

    def _signal_workers(self, workers: frozenset[int], number: int) -> None:
        pids = [self.pids[worker] for worker in workers if self._gets(worker, number)]
        ended = [self.pids[worker] for worker in workers & self.statuses.keys()]
        signal_workers(pids, number, adopts=self._adopts_orphans, ended=ended)

    def _gets(self, worker: int, number: int) -> bool:
        """Whether to send the signal: SIGUSR1, which opens logs again, would end a program that does not expect it."""
        if not (number == signal.SIGUSR1 and self._routing.rotated):
            return True
        return self._starting_descriptor(worker) is None and catches(self.pids[worker], number)

    def _reap(self) -> None:
        """Effect: handles children that have ended, in the order of their ends, and then what they left behind.

        Of more than MAX_REAPED, the others are handled at once after signals and deadlines.
        Raises: LaunchError or NotExecutableError if one has ended because it could not be executed.
        """
        for pid in self._worker_of if self._of_launchers else ():
            continue_stopped(pid, paused=self.is_paused)
        killed = set[int]()
        for number, ended in enumerate(islice(iter(self._exits.first, None), MAX_REAPED), 1):
            index = self._worker_of.get(ended.pid)
            if index in self.statuses:
                index = None  # Its tracer has let go of it, or an orphan has got its pid.
            if index is not None:
                if (fd := self._starting_descriptor(index)) is not None:
                    self._confirm_executed(fd, ended=True)
                self._record_end(index, ended.status)
                # Before the group's leader is reaped: until then the number of the group cannot be reused.
                seconds = self._ending_seconds(ended.status > 0 and not self.state.ending)
                self._output_deadline -= seconds  # Of a launcher, some of the grace period is its own.
                self._handle(WorkerEnded(index, failed=ended.status != 0, ending_seconds=seconds))
            if ended.status < 0:
                killed.add(ended.pid)
            if index is None or self._watch is None:
                reap(ended)
            else:
                self._watch.worker_ended(index, reap_measured(ended))
            if number == MAX_REAPED:
                wake(self._wakeup_write)
        # Of orphans too, as ranks are whose agent ends first; not at the end alone, as this process may be killed.
        self._searches.remove(frozenset(killed))
        if len(self._killed) < MAX_KILLED:
            self._killed |= killed
        self._check_groups()

    def _check_groups(self) -> None:
        """Effect: handles groups that are gone. One that got SIGKILL counts as gone.

        Its last process may be a zombie whose parent, an orphan, never waits for it.
        """
        for index in sorted(self.state.groups & self.statuses.keys()):
            if self.state.is_killed(index) or not group_exists(self.pids[index], adopts=self._adopts_orphans):
                self._handle(GroupGone(index))
        if not self.state.groups:
            orphans = endable_children()
            if self.state.killing and all(map(has_ended_traced, orphans)):
                orphans = frozenset()  # They have ended, and a tracer from outside the launch does not let go of them.
            if not orphans and not self._all_ended:
                self._pump.limit()
                self._output_deadline = max(self._output_deadline, self._clock() + OUTPUT_SECONDS)
            self._all_ended = not orphans
            if orphans or self.state.orphans:
                self._handle(OrphansFound(orphans))

    def _output_done(self) -> bool:
        """Whether all output is written, or is to be abandoned."""
        while True:
            try:
                return self._output_moved()
            except SinkError as error:  # What this sink does not take, others still may. Each fails once.
                self._fail_output(error)

    def _output_moved(self) -> bool:
        """Whether all output is written, or is to be abandoned. Raises: SinkError."""
        overdue = _is_due(self._output_deadline, self._clock())
        while self._pump.drain() or (overdue and self._pump.abandon_waiting()):
            self._handle_urgent()
        if self._pump.has_unread_output and not overdue:
            return False
        while self._pump.finish():
            self._handle_urgent()
        return self._pump.all_written or overdue


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
