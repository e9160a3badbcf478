"""What to do about what happened: the supervisor's decisions, without a process, a file or a clock.

`step(state, event, now)` returns the next state and what to do. A worker's group is the worker and all it
started that stayed in its process group; orphans are descendants that left it. A group that is told to end
gets a deadline; a deadline that passes is answered by SIGKILL.
"""

from __future__ import annotations

from cpulaunch.records.record import field, fields, record
from cpulaunch.system.signals import ENDING, SIGCONT, SIGINT, SIGKILL, SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any


@record(kw_only=False)
class WorkerEnded:
    """A worker's own process ended; others of its group may live on."""

    worker: int
    failed: bool


@record(kw_only=False)
class GroupGone:
    """Nothing of the worker's group is left."""

    worker: int


@record(kw_only=False)
class OrphansFound:
    """These descendants left their worker's group; all groups are gone."""

    pids: frozenset[int]


@record(kw_only=False)
class SignalArrived:
    """Somebody signalled the launcher."""

    number: int


@record(kw_only=False)
class LauncherGone:
    """The process the user started was killed: end everything at once."""


@record(kw_only=False)
class OutputFailed:
    """Output that was asked for can no longer be written."""


@record(kw_only=False)
class TimePassed:
    """Nothing happened until the next deadline."""


Event = WorkerEnded | GroupGone | OrphansFound | SignalArrived | LauncherGone | OutputFailed | TimePassed


@record(kw_only=False)
class SignalGroups:
    """Send a signal to these workers' process groups."""

    workers: frozenset[int]
    number: int


@record(kw_only=False)
class SignalOrphans:
    """Send a signal to these processes."""

    pids: frozenset[int]
    number: int


Action = SignalGroups | SignalOrphans


@record
class SupervisionState:
    """Who lives, who was told to end by when (seconds of the monotonic clock), and why it all ends."""

    grace_seconds: float
    groups: frozenset[int]
    ending_signals: frozenset[int] = ENDING
    deadlines: Mapping[int, float] = field(default_factory=dict)
    orphans: frozenset[int] = frozenset()
    orphan_deadline: float | None = None
    ending: bool = False
    killing: bool = False
    killed: frozenset[int] = frozenset()
    first_failure: int | None = None
    ended_by: int | None = None
    end_requested: bool = False
    """Whether somebody wanted this to end: by a signal that ends it, or one that is passed on and usually would."""
    output_failed: bool = False

    def is_killed(self, worker: int) -> bool:
        """Whether nothing of the worker's group can live on, so that nobody needs to wait for it."""
        return self.killing or worker in self.killed

    @property
    def next_deadline(self) -> float | None:
        """When `TimePassed` is due; None: sleep until something happens."""
        orphan = () if self.orphan_deadline is None else (self.orphan_deadline,)
        return min((*self.deadlines.values(), *orphan), default=None)


def _with(state: SupervisionState, **changes: Any) -> SupervisionState:
    """The state with some of its fields changed."""
    return SupervisionState(**{name: getattr(state, name) for name in fields(SupervisionState)} | changes)


def with_worker(state: SupervisionState, worker: int) -> SupervisionState:
    """The state with one more worker's group in it."""
    return _with(state, groups=state.groups | {worker})


Step = tuple[SupervisionState, tuple[Action, ...]]


def step(state: SupervisionState, event: Event, now: float) -> Step:
    """The next state and what to do about the event."""
    match event:
        case WorkerEnded():
            return _worker_ended(state, event, now)
        case GroupGone(worker=worker):
            deadlines = {i: at for i, at in state.deadlines.items() if i != worker}
            return _with(state, groups=state.groups - {worker}, deadlines=deadlines), ()
        case OrphansFound(pids=pids):
            return _orphans_found(state, pids, now)
        case SignalArrived(number=number):
            return _signal_arrived(state, number, now)
        case LauncherGone():
            return _kill_all(_with(state, ended_by=state.ended_by or SIGKILL, end_requested=True))
        case OutputFailed():
            failed = _with(state, output_failed=True)
            return (failed, ()) if state.ending else _end_all(failed, now, SIGTERM)
        case TimePassed():
            return _time_passed(state, now)


def _worker_ended(state: SupervisionState, event: WorkerEnded, now: float) -> Step:
    """What the worker left behind ends; the first failure ends all."""
    if event.failed and not state.ending:
        return _end_all(_with(state, first_failure=event.worker), now, SIGTERM)
    if event.worker in state.deadlines or state.is_killed(event.worker):
        return state, _signal_groups({event.worker}, SIGKILL if state.is_killed(event.worker) else SIGTERM)
    deadlines = {**state.deadlines, event.worker: now + state.grace_seconds}
    return _with(state, deadlines=deadlines), _signal_groups({event.worker}, SIGTERM)


def _orphans_found(state: SupervisionState, pids: frozenset[int], now: float) -> Step:
    if state.killing:
        return state, (SignalOrphans(pids, SIGKILL),)
    new = pids - state.orphans
    if not new:
        return state, ()
    deadline = now + state.grace_seconds if state.orphan_deadline is None else state.orphan_deadline
    told = _with(state, orphans=state.orphans | pids, orphan_deadline=deadline)
    return told, (SignalOrphans(new, SIGTERM), SignalOrphans(new, SIGCONT))


def _signal_arrived(state: SupervisionState, number: int, now: float) -> Step:
    """Ending signals end the launch; a Ctrl-C while it ends kills at once; all others are passed on."""
    if number in ENDING or number in state.ending_signals:
        state = _with(state, end_requested=True)
    if number not in state.ending_signals:
        return state, (SignalGroups(state.groups, number),) if state.groups else ()
    if number == SIGINT and state.ending:
        return _kill_all(state)
    if state.ending:
        return state, _signal_groups(state.groups, number)
    return _end_all(_with(state, ended_by=number), now, number)


def _end_all(state: SupervisionState, now: float, number: int) -> Step:
    """Groups that were told before keep their deadline."""
    deadlines = {index: state.deadlines.get(index, now + state.grace_seconds) for index in state.groups}
    return _with(state, ending=True, deadlines=deadlines), _signal_groups(state.groups, number)


def _kill_all(state: SupervisionState) -> Step:
    killed = _with(state, ending=True, killing=True, deadlines={}, orphan_deadline=None)
    return killed, (*_signal_groups(state.groups, SIGKILL), *_signal_orphans(state.orphans, SIGKILL))


def _time_passed(state: SupervisionState, now: float) -> Step:
    overdue = frozenset(index for index, at in state.deadlines.items() if at <= now)
    deadlines = {index: at for index, at in state.deadlines.items() if index not in overdue}
    orphans_overdue = state.orphan_deadline is not None and state.orphan_deadline <= now
    if orphans_overdue:
        state = _with(state, killing=True, orphan_deadline=None)
    orphans = state.orphans if orphans_overdue else frozenset()
    killed = state.killed | overdue
    return _with(state, deadlines=deadlines, killed=killed), (
        *_signal_groups(overdue, SIGKILL),
        *_signal_orphans(orphans, SIGKILL),
    )


def _signal_groups(indexes: Iterable[int], number: int) -> tuple[Action, ...]:
    """Signal these groups; a stopped process acts on a signal only when it goes on."""
    groups = frozenset(indexes)
    if not groups:
        return ()
    sent = SignalGroups(groups, number)
    return (sent,) if number == SIGKILL else (sent, SignalGroups(groups, SIGCONT))


def _signal_orphans(pids: frozenset[int], number: int) -> tuple[Action, ...]:
    return (SignalOrphans(pids, number),) if pids else ()
