"""The supervisor's decisions as a state machine: no process, file or clock is touched here.

`step(state, event, now)` returns the next state and the signals to send. A worker's group is its process group: the
worker and those of its descendants that stayed in it. Orphans are descendants that left their group and that the
supervisor has adopted. A group that is signalled to end gets a deadline; at the deadline it gets SIGKILL. Orphans get
the last deadline of the groups, or a moment to react to SIGTERM if that has passed.
"""

from __future__ import annotations

from cpulaunch.records.record import field, record, replace
from cpulaunch.system.signals import ENDING, SIGCONT, SIGINT, SIGKILL, SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


REACTION_SECONDS = 0.5
"""How long orphans that are found at their workers' deadline may take to end, if the grace period is as long."""

REPEAT_SECONDS = 2.0
"""How long after the last resort it is tried again: a process that the kernel cannot interrupt may take minutes."""


@record(kw_only=False)
class WorkerEnded:
    """The worker's own process ended; other processes of its group may still run.

    `ending_seconds`: how much of the grace period is over for what its workers leave, if it is a launcher.
    """

    worker: int
    failed: bool
    ending_seconds: float = 0.0


@record(kw_only=False)
class GroupGone:
    """The last process of the worker's group ended."""

    worker: int


@record(kw_only=False)
class OrphansFound:
    """All groups are gone, and of the orphans these are left."""

    pids: frozenset[int]


@record(kw_only=False)
class SignalArrived:
    """The launcher received a signal."""

    number: int


@record(kw_only=False)
class LauncherGone:
    """The process that the user started was killed."""


@record(kw_only=False)
class OutputFailed:
    """The workers' output can no longer be written."""


@record(kw_only=False)
class TimePassed:
    """A deadline has passed."""


Event = WorkerEnded | GroupGone | OrphansFound | SignalArrived | LauncherGone | OutputFailed | TimePassed


@record(kw_only=False)
class SignalGroups:
    """Send a signal to these workers' process groups."""

    workers: frozenset[int]
    number: int


@record(kw_only=False)
class SignalOrphans:
    """Send a signal to these orphans."""

    pids: frozenset[int]
    number: int


@record(kw_only=False)
class KillDescendants:
    """Kill every process below the launch: some worker has got SIGKILL and does not end."""


Action = SignalGroups | SignalOrphans | KillDescendants


@record
class SupervisionState:
    """The groups and orphans that run, their deadlines (seconds of the monotonic clock), and why the launch ends."""

    grace_seconds: float
    groups: frozenset[int]
    ending_signals: frozenset[int] = ENDING
    deadlines: Mapping[int, float] = field(default_factory=dict)
    last_deadline: float | None = None
    """The latest deadline that a group has had."""
    orphans: frozenset[int] = frozenset()
    orphan_deadline: float | None = None
    last_resort: float | None = None
    """When every descendant is killed if groups or orphans that got SIGKILL still exist.

    A process may hold one at its end, or hide that end, which is then seen only when it is looked for again."""
    ending: bool = False
    killing: bool = False
    killed: frozenset[int] = frozenset()
    first_failure: int | None = None
    ended_by: int | None = None
    interrupted: bool = False
    """Whether a SIGINT has arrived: the next one kills."""
    end_requested: bool = False
    """Whether the user asked for the end: by a signal that ends the launch, or one that usually would."""
    output_failed: bool = False

    def is_killed(self, worker: int) -> bool:
        """Whether the worker's group got SIGKILL, so that the supervisor need not wait for its processes."""
        return self.killing or worker in self.killed

    @property
    def next_deadline(self) -> float | None:
        """When `TimePassed` is due; None: at no time."""
        others = [at for at in (self.orphan_deadline, self.last_resort) if at is not None]
        return min((*self.deadlines.values(), *others), default=None)


def with_worker(state: SupervisionState, worker: int) -> SupervisionState:
    """The state with the worker's group added."""
    return replace(state, groups=state.groups | {worker})


Step = tuple[SupervisionState, tuple[Action, ...]]


def step(state: SupervisionState, event: Event, now: float) -> Step:
    """The next state, and the signals to send because of the event."""
    match event:
        case WorkerEnded():
            return _worker_ended(state, event, now)
        case GroupGone(worker=worker):
            deadlines = {i: at for i, at in state.deadlines.items() if i != worker}
            groups = state.groups - {worker}
            last_resort = state.last_resort if groups else None
            return replace(state, groups=groups, deadlines=deadlines, last_resort=last_resort), ()
        case OrphansFound(pids=pids):
            return _orphans_found(state, pids, now)
        case SignalArrived(number=number):
            return _signal_arrived(state, number, now)
        case LauncherGone():
            return _kill_all(replace(state, ended_by=state.ended_by or SIGKILL, end_requested=True), now)
        case OutputFailed():
            failed = replace(state, output_failed=True)
            return (failed, ()) if state.ending else _end_all(failed, now, SIGTERM)
        case TimePassed():
            return _time_passed(state, now)


def _worker_ended(state: SupervisionState, event: WorkerEnded, now: float) -> Step:
    """The rest of the worker's group is ended; the first failure ends all groups."""
    if event.failed and not state.ending:
        return _end_all(replace(state, first_failure=event.worker), now - event.ending_seconds, SIGTERM)
    if state.is_killed(event.worker):
        return state, _signal_groups({event.worker}, SIGKILL)
    deadline = state.deadlines.get(event.worker, now + state.grace_seconds) - event.ending_seconds
    deadlines = {**state.deadlines, event.worker: deadline}
    return replace(state, deadlines=deadlines, last_deadline=deadline), _signal_groups({event.worker}, SIGTERM)


def _orphans_found(state: SupervisionState, pids: frozenset[int], now: float) -> Step:
    """Orphans that are gone are forgotten, as their pids may be given to other processes."""
    new = pids - state.orphans
    state = replace(state, orphans=pids, orphan_deadline=state.orphan_deadline if pids else None)
    if state.killing:
        last_resort = (state.last_resort or now + REACTION_SECONDS) if pids else None
        return replace(state, last_resort=last_resort), _signal_orphans(pids, SIGKILL)
    if not new:
        return state, ()
    if state.orphan_deadline is None:
        earliest = now + min(state.grace_seconds, REACTION_SECONDS)
        last = now + state.grace_seconds if state.last_deadline is None else state.last_deadline
        state = replace(state, orphan_deadline=max(earliest, last))
    return state, (SignalOrphans(new, SIGTERM), SignalOrphans(new, SIGCONT))


def _signal_arrived(state: SupervisionState, number: int, now: float) -> Step:
    """Ending signals end the launch, a second Ctrl-C kills at once, all other signals are forwarded."""
    if number in ENDING or number in state.ending_signals:
        state = replace(state, end_requested=True)
    if number not in state.ending_signals:
        return state, (SignalGroups(state.groups, number),) if state.groups else ()
    if number == SIGINT and state.interrupted:
        return _kill_all(state, now)
    if number == SIGINT:
        state = replace(state, interrupted=True)
    if state.ending:
        return state, _signal_groups(state.groups, number)
    return _end_all(replace(state, ended_by=number), now, number)


def _end_all(state: SupervisionState, now: float, number: int) -> Step:
    """Groups that already have a deadline keep it."""
    deadline = now + state.grace_seconds
    deadlines = {index: state.deadlines.get(index, deadline) for index in state.groups}
    ending = replace(state, ending=True, deadlines=deadlines, last_deadline=deadline)
    return ending, _signal_groups(state.groups, number)


def _kill_all(state: SupervisionState, now: float) -> Step:
    last_resort = now + REACTION_SECONDS if state.groups else None
    killed = replace(state, ending=True, killing=True, deadlines={}, orphan_deadline=None, last_resort=last_resort)
    return killed, (*_signal_groups(state.groups, SIGKILL), *_signal_orphans(state.orphans, SIGKILL))


def _time_passed(state: SupervisionState, now: float) -> Step:
    overdue = frozenset(index for index, at in state.deadlines.items() if at <= now)
    deadlines = {index: at for index, at in state.deadlines.items() if index not in overdue}
    orphans_overdue = state.orphan_deadline is not None and state.orphan_deadline <= now
    if orphans_overdue:
        state = replace(state, killing=True, orphan_deadline=None)
    orphans = state.orphans if orphans_overdue else frozenset()
    killed = state.killed | overdue
    is_last = state.last_resort is not None and state.last_resort <= now
    last_resort = now + REPEAT_SECONDS if is_last else state.last_resort
    if overdue and state.ending and last_resort is None:
        last_resort = now + REACTION_SECONDS
    killing = state.killing or is_last
    return replace(state, deadlines=deadlines, killed=killed, killing=killing, last_resort=last_resort), (
        *_signal_groups(overdue, SIGKILL),
        *_signal_orphans(orphans, SIGKILL),
        *((KillDescendants(),) if is_last else ()),
    )


def _signal_groups(indexes: Iterable[int], number: int) -> tuple[Action, ...]:
    """The signal for these groups, and SIGCONT: a stopped process handles signals only once it continues."""
    groups = frozenset(indexes)
    if not groups:
        return ()
    sent = SignalGroups(groups, number)
    return (sent,) if number == SIGKILL else (sent, SignalGroups(groups, SIGCONT))


def _signal_orphans(pids: frozenset[int], number: int) -> tuple[Action, ...]:
    return (SignalOrphans(pids, number),) if pids else ()
