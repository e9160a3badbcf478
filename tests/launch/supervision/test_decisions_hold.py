"""Whatever happens in whatever order, the supervisor's decisions keep their promises: a state machine of hypothesis.

A model of the kernel's processes follows the signals, and tells the decisions what the supervisor would see of it.
"""

import signal
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cpulaunch.launch.ranks.attempts import MAX_LOST_PORTS, Attempts
from cpulaunch.launch.supervision.state_machine import (
    GroupGone,
    KillDescendants,
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
from cpulaunch.launch.supervision.supervise import launch_exit_code
from cpulaunch.records.errors import LaunchError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
PROMISED_SECONDS = 1.0
"""At most so long after the grace period nothing is left. Source: docs/security.md."""

CALM, STUBBORN, HELD = "ends at a signal", "ends at SIGKILL", "ends when its tracer is killed"


@dataclass
class Worker:
    """A worker's group: how its own process and its others react, and the orphan that it leaves, if any."""

    kind: str
    others: list[str]
    orphan: str | None
    status: int | None = None
    gone: bool = False
    signalled_at: float | None = None


@dataclass
class World:
    """The processes that live."""

    workers: dict[int, Worker] = field(default_factory=dict)
    orphans: dict[int, str] = field(default_factory=dict)

    def end(self, index: int, status: int) -> None:
        worker = self.workers[index]
        worker.status = status
        if worker.orphan is not None:
            self.orphans[100 + index] = worker.orphan


def survives(kind: str, number: int) -> bool:
    """Whether a process that reacts like this lives on after the signal."""
    if number == signal.SIGKILL:
        return kind == HELD
    return kind != CALM or number not in ENDING


class Supervision(RuleBasedStateMachine):
    """The events of one launch, and the promises."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.world = World()
        self.state = SupervisionState(grace_seconds=0.0, groups=frozenset())
        self.causes: list[tuple[str, int]] = []
        self.ended_since: float | None = None
        self.kill_at_once = False
        self.told: set[int] = set()

    @initialize(
        workers=st.lists(
            st.tuples(
                st.sampled_from([CALM, STUBBORN, HELD]),
                st.lists(st.sampled_from([STUBBORN, CALM]), max_size=2),
                st.sampled_from([None, CALM, STUBBORN]),
            ),
            min_size=1,
            max_size=4,
        ),
        grace=st.sampled_from([10.0, 0.3, 0.0]),
    )
    def start(self, workers: list, grace: float) -> None:
        self.state = SupervisionState(grace_seconds=grace, groups=frozenset())
        for index, (kind, others, orphan) in enumerate(workers):
            self.world.workers[index] = Worker(kind=kind, others=list(others), orphan=orphan)
            self.state = with_worker(self.state, index)

    # What happens.

    @rule(data=st.data(), status=st.sampled_from([0, 0, 0, 0, 3, -9]))
    def a_worker_ends(self, data: st.DataObject, status: int) -> None:
        alive = [index for index, worker in self.world.workers.items() if worker.status is None]
        if alive:
            self.world.end(data.draw(st.sampled_from(alive)), status)
            self.see()

    @rule(data=st.data())
    def the_rest_of_a_group_ends(self, data: st.DataObject) -> None:
        worker = self.world.workers[data.draw(st.sampled_from(sorted(self.world.workers)))]
        worker.others.clear()
        self.see()

    @rule(number=st.sampled_from(ENDING))
    def a_signal_ends_the_launch(self, number: int) -> None:
        if self.state.interrupted and number == signal.SIGINT:
            self.kill_at_once = True
        self.happen(SignalArrived(int(number)), cause=("signal", int(number)))

    @rule(number=st.sampled_from(PASSED_ON))
    def a_signal_is_passed_on(self, number: int) -> None:
        before = self.state
        self.happen(SignalArrived(int(number)))
        assert self.state.ending == before.ending

    @rule()
    def the_guard_is_killed(self) -> None:
        self.kill_at_once = True
        self.happen(LauncherGone(), cause=("signal", int(signal.SIGKILL)))

    @rule()
    def the_output_fails(self) -> None:
        self.happen(OutputFailed(), cause=("output", 0))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 4.0, 4.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.state.next_deadline is not None and self.state.next_deadline <= until:
            self.now = max(self.now, self.state.next_deadline)
            self.happen(TimePassed())
        self.now = until

    # What the supervisor makes of it.

    def happen(self, event: object, cause: tuple[str, int] | None = None) -> None:
        """Decides, carries the actions out, and looks at what has changed."""
        if cause is not None:
            self.causes.append(cause)
        self.decide(event)
        self.see()

    def decide(self, event: object) -> None:
        self.state, actions = step(self.state, event, self.now)
        if self.state.ending and self.ended_since is None:
            self.ended_since = self.now
        for action in actions:
            if isinstance(action, KillDescendants):
                self.kill_descendants()
            elif isinstance(action, SignalGroups):
                self.signal_groups(action.workers, action.number)
            else:
                self.signal_orphans(action.pids, action.number)

    def kill_descendants(self) -> None:
        assert self.state.killing
        for index, worker in self.world.workers.items():
            worker.others.clear()
            if worker.status is None:
                self.world.end(index, -int(signal.SIGKILL))
        self.world.orphans.clear()

    def signal_groups(self, workers: frozenset[int], number: int) -> None:
        for index in workers:
            worker = self.world.workers[index]
            assert not worker.gone, "a group that is gone gets no signal: its number may be another's"
            if number == signal.SIGKILL:
                overdue = worker.signalled_at is not None and self.now >= worker.signalled_at + self.state.grace_seconds
                assert overdue or self.kill_at_once or self.state.killing, "SIGKILL comes after the grace period"
            elif number in ENDING and worker.signalled_at is None:
                worker.signalled_at = self.now
            worker.others = [kind for kind in worker.others if survives(kind, number)]
            if worker.status is None and not survives(worker.kind, number):
                self.world.end(index, -number)

    def signal_orphans(self, pids: frozenset[int], number: int) -> None:
        assert not self.state.groups or self.state.killing, "orphans are left alone while workers run"
        for pid in pids & self.world.orphans.keys():
            if not survives(self.world.orphans[pid], number):
                del self.world.orphans[pid]

    def see(self) -> None:
        """As the supervisor: each worker that has ended, then the groups that are gone, then the orphans."""
        seen = True
        while seen:
            seen = False
            for index, worker in self.world.workers.items():
                if worker.status is not None and index not in self.told:
                    self.told.add(index)
                    if worker.status and not self.causes:
                        self.causes.append(("failure", index))
                    self.decide(WorkerEnded(index, failed=worker.status != 0))
                    seen = True
            for index in sorted(self.state.groups & self.told):
                if self.state.is_killed(index) or not self.world.workers[index].others:
                    self.world.workers[index].gone = True
                    self.decide(GroupGone(index))
                    seen = True
            if not self.state.groups and (self.world.orphans or self.state.orphans):
                before = self.state
                self.decide(OrphansFound(frozenset(self.world.orphans)))
                seen = seen or self.state != before

    # What is promised.

    @invariant()
    def an_ending_launch_has_a_deadline(self) -> None:
        if self.state.ending and self.state.groups:
            assert self.state.next_deadline is not None
        if self.state.orphans:
            assert self.state.killing or self.state.next_deadline is not None

    @invariant()
    def the_deadline_is_within_the_grace_period_and_a_moment(self) -> None:
        if self.ended_since is not None and self.state.groups:
            assert self.state.next_deadline <= max(
                self.ended_since + self.state.grace_seconds + PROMISED_SECONDS, self.now + PROMISED_SECONDS
            )

    @invariant()
    def the_first_cause_is_the_verdict(self) -> None:
        kind, what = self.causes[0] if self.causes else (None, 0)
        assert self.state.first_failure == (what if kind == "failure" else None)
        signals = [number for each, number in self.causes if each == "signal"]
        if kind == "signal":
            assert self.state.ended_by == what
        if not signals:
            assert self.state.ended_by is None

    def teardown(self) -> None:
        """However it went: everything is gone in time once the launch ends, and the exit code is the documented one."""
        if not self.world.workers:
            return
        if not self.state.ending and self.state.groups:
            self.a_signal_ends_the_launch(signal.SIGTERM)
        began = self.now
        while self.state.groups or self.world.orphans:
            due = self.state.next_deadline
            assert due is not None, "something is left and no deadline will come"
            self.now = max(self.now, due)
            assert self.now <= began + self.state.grace_seconds + PROMISED_SECONDS
            self.happen(TimePassed())
        self.check_exit_code()

    def check_exit_code(self) -> None:
        statuses = {i: w.status if w.status >= 0 else 128 - w.status for i, w in self.world.workers.items()}
        failed = LaunchError("no space left") if self.state.output_failed else None
        kind, what = self.causes[0] if self.causes else (None, 0)
        if failed is not None:
            expected = 125
        elif kind == "failure":
            expected = statuses[what]
        elif kind == "signal" and (what == signal.SIGINT or any(statuses.values())):
            expected = 128 + what
        else:
            expected = 0
        assert launch_exit_code(self.state, statuses, failed) == expected


Supervision.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None, derandomize=True)
TestSupervision = Supervision.TestCase


@given(st.integers(0, 5), st.lists(st.booleans(), max_size=15))
def test_every_restart_that_is_allowed_is_made_and_no_other(max_restarts, lost_ports):
    attempts = Attempts(max_restarts=max_restarts)
    for lost_port in lost_ports:
        following = attempts.following(lost_port=lost_port)
        if following is None:
            assert attempts.restarts == max_restarts
            assert not lost_port or attempts.lost_ports == MAX_LOST_PORTS
            return
        assert following.restarts - attempts.restarts + following.lost_ports - attempts.lost_ports == 1
        assert lost_port or following.restarts > attempts.restarts
        attempts = following
    assert attempts.restarts <= max_restarts
    assert attempts.lost_ports <= MAX_LOST_PORTS
