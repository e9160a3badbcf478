"""The supervisor's decisions, replayed from tables with times that never pass."""

import signal

import pytest

from cpulaunch.launch.supervision.state_machine import (
    GroupGone,
    KillDescendants,
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
)

INT, TERM, KILL, HUP, USR1, CONT = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGKILL,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGCONT,
)
GRACE = 10.0


def groups(number, *workers):
    return SignalGroups(frozenset(workers), number)


def orphans(number, *pids):
    return SignalOrphans(frozenset(pids), number)


def replay(*events, workers=(0, 1, 2)):
    """The last state and all actions but SIGCONT, each with its time, of events at times."""
    state = SupervisionState(grace_seconds=GRACE, groups=frozenset(workers))
    done = []
    for now, event in events:
        state, actions = step(state, event, now)
        done += [(now, action) for action in actions if getattr(action, "number", None) != CONT]
    return state, done


CASES = {
    "success ends only what the worker left behind": (
        [(1, WorkerEnded(0, failed=False)), (1, GroupGone(0)), (2, WorkerEnded(1, failed=False)), (2, GroupGone(1))],
        [(1, groups(TERM, 0)), (2, groups(TERM, 1))],
    ),
    "the first failure ends the others": (
        [(1, WorkerEnded(1, failed=True))],
        [(1, groups(TERM, 0, 1, 2))],
    ),
    "what ranks leave has no second grace period after their agent has waited for it": (
        [
            (11, WorkerEnded(0, failed=True, ending_seconds=GRACE)),
            (11, GroupGone(0)),
            (11, GroupGone(1)),
            (11, GroupGone(2)),
            (11, OrphansFound(frozenset({70}))),
            (11.5, TimePassed()),
        ],
        [(11, groups(TERM, 0, 1, 2)), (11, orphans(TERM, 70)), (11.5, orphans(KILL, 70))],
    ),
    "what ranks leave has no longer than the grace period after their agent has ended well": (
        [
            (20, WorkerEnded(0, failed=False, ending_seconds=5)),
            (20, GroupGone(0)),
            (20, GroupGone(1)),
            (20, GroupGone(2)),
            (20, OrphansFound(frozenset({70}))),
            (24, TimePassed()),
            (25, TimePassed()),
        ],
        [(20, groups(TERM, 0)), (20, orphans(TERM, 70)), (25, orphans(KILL, 70))],
    ),
    "nor after a signal": (
        [
            (1, SignalArrived(TERM)),
            (2, WorkerEnded(0, failed=True, ending_seconds=5)),
            (2, GroupGone(0)),
            (2, GroupGone(1)),
            (2, GroupGone(2)),
            (2, OrphansFound(frozenset({70}))),
            (5, TimePassed()),
            (6, TimePassed()),
        ],
        [(1, groups(TERM, 0, 1, 2)), (2, groups(TERM, 0)), (2, orphans(TERM, 70)), (6, orphans(KILL, 70))],
    ),
    "who does not end within the grace is killed": (
        [(1, WorkerEnded(1, failed=True)), (1, GroupGone(1)), (11, TimePassed())],
        [(1, groups(TERM, 0, 1, 2)), (11, groups(KILL, 0, 2))],
    ),
    "a later deadline is not due yet": (
        [(1, WorkerEnded(1, failed=True)), (10.5, TimePassed())],
        [(1, groups(TERM, 0, 1, 2))],
    ),
    "what a worker leaves behind has its own grace": (
        [(1, WorkerEnded(0, failed=False)), (5, WorkerEnded(1, failed=False)), (11, TimePassed()), (15, TimePassed())],
        [(1, groups(TERM, 0)), (5, groups(TERM, 1)), (11, groups(KILL, 0)), (15, groups(KILL, 1))],
    ),
    "what a killed worker leaves is killed too": (
        [(1, SignalArrived(TERM)), (11, TimePassed()), (12, WorkerEnded(0, failed=True))],
        [(1, groups(TERM, 0, 1, 2)), (11, groups(KILL, 0, 1, 2)), (12, groups(KILL, 0))],
    ),
    "Ctrl-C is passed on": ([(1, SignalArrived(INT))], [(1, groups(INT, 0, 1, 2))]),
    "Ctrl-C twice kills at once": (
        [(1, SignalArrived(INT)), (2, SignalArrived(INT))],
        [(1, groups(INT, 0, 1, 2)), (2, groups(KILL, 0, 1, 2))],
    ),
    "the first Ctrl-C while it ends is passed on, the second kills at once": (
        [(1, SignalArrived(TERM)), (2, SignalArrived(INT)), (3, SignalArrived(TERM)), (4, SignalArrived(INT))],
        [(1, groups(TERM, 0, 1, 2)), (2, groups(INT, 0, 1, 2)), (3, groups(TERM, 0, 1, 2)), (4, groups(KILL, 0, 1, 2))],
    ),
    "so it is after a failure": (
        [(1, WorkerEnded(0, failed=True)), (1, GroupGone(0)), (2, SignalArrived(INT)), (3, SignalArrived(INT))],
        [(1, groups(TERM, 0, 1, 2)), (2, groups(INT, 1, 2)), (3, groups(KILL, 1, 2))],
    ),
    "SIGTERM twice is passed on twice": (
        [(1, SignalArrived(TERM)), (2, SignalArrived(TERM))],
        [(1, groups(TERM, 0, 1, 2)), (2, groups(TERM, 0, 1, 2))],
    ),
    "SIGHUP ends within the grace": (
        [(1, SignalArrived(HUP)), (11, TimePassed())],
        [(1, groups(HUP, 0, 1, 2)), (11, groups(KILL, 0, 1, 2))],
    ),
    "SIGUSR1 is passed on and nothing ends": (
        [(1, SignalArrived(USR1)), (11, TimePassed())],
        [(1, groups(USR1, 0, 1, 2))],
    ),
    "the launcher's death kills at once": ([(1, LauncherGone())], [(1, groups(KILL, 0, 1, 2))]),
    "lost output ends the workers": ([(1, OutputFailed())], [(1, groups(TERM, 0, 1, 2))]),
    "orphans that are gone are forgotten, as other processes may get their pids": (
        [
            (1, GroupGone(0)),
            (1, GroupGone(1)),
            (1, GroupGone(2)),
            (2, OrphansFound(frozenset({70, 71}))),
            (3, OrphansFound(frozenset({71}))),
            (12, TimePassed()),
        ],
        [(2, orphans(TERM, 70, 71)), (12, orphans(KILL, 71))],
    ),
    "no signal is due once all orphans are gone": (
        [
            (1, GroupGone(0)),
            (1, GroupGone(1)),
            (1, GroupGone(2)),
            (2, OrphansFound(frozenset({70}))),
            (3, OrphansFound(frozenset())),
            (12, TimePassed()),
        ],
        [(2, orphans(TERM, 70))],
    ),
    "orphans found at the workers' deadline get a moment": (
        [
            (1, SignalArrived(TERM)),
            (11, TimePassed()),
            (11, GroupGone(0)),
            (11, GroupGone(1)),
            (11, GroupGone(2)),
            (11, OrphansFound(frozenset({70}))),
            (11.5, TimePassed()),
        ],
        [(1, groups(TERM, 0, 1, 2)), (11, groups(KILL, 0, 1, 2)), (11, orphans(TERM, 70)), (11.5, orphans(KILL, 70))],
    ),
    "a worker that SIGKILL does not end is a reason to kill every descendant, again and again": (
        [
            (1, SignalArrived(TERM)),
            (11, TimePassed()),
            (11.4, TimePassed()),
            (11.5, TimePassed()),
            (13.5, TimePassed()),
        ],
        [
            (1, groups(TERM, 0, 1, 2)),
            (11, groups(KILL, 0, 1, 2)),
            (11.5, KillDescendants()),
            (13.5, KillDescendants()),
        ],
    ),
    "Ctrl-C twice has the same last resort": (
        [(1, SignalArrived(INT)), (2, SignalArrived(INT)), (2.5, TimePassed())],
        [(1, groups(INT, 0, 1, 2)), (2, groups(KILL, 0, 1, 2)), (2.5, KillDescendants())],
    ),
    "groups that SIGKILL has ended need no last resort": (
        [
            (1, SignalArrived(TERM)),
            (11, TimePassed()),
            (11.1, GroupGone(0)),
            (11.1, GroupGone(1)),
            (11.1, GroupGone(2)),
            (11.5, TimePassed()),
        ],
        [(1, groups(TERM, 0, 1, 2)), (11, groups(KILL, 0, 1, 2))],
    ),
    "orphans that SIGKILL does not end are a reason to kill every descendant, and to look for them again": (
        [
            (1, GroupGone(0)),
            (1, GroupGone(1)),
            (1, GroupGone(2)),
            (2, OrphansFound(frozenset({70}))),
            (12, TimePassed()),
            (12, OrphansFound(frozenset({70}))),
            (12.5, TimePassed()),
            (14.5, TimePassed()),
            (15, OrphansFound(frozenset())),
            (17, TimePassed()),
        ],
        [
            (2, orphans(TERM, 70)),
            (12, orphans(KILL, 70)),
            (12, orphans(KILL, 70)),
            (12.5, KillDescendants()),
            (14.5, KillDescendants()),
        ],
    ),
    "orphans get SIGTERM once, then SIGKILL": (
        [
            (1, GroupGone(0)),
            (1, GroupGone(1)),
            (1, GroupGone(2)),
            (2, OrphansFound(frozenset({70}))),
            (3, OrphansFound(frozenset({70, 71}))),
            (12, TimePassed()),
            (13, OrphansFound(frozenset({72}))),
        ],
        [(2, orphans(TERM, 70)), (3, orphans(TERM, 71)), (12, orphans(KILL, 70, 71)), (13, orphans(KILL, 72))],
    ),
}


@pytest.mark.parametrize(("events", "actions"), CASES.values(), ids=CASES.keys())
def test_events_lead_to_actions(events, actions):
    assert replay(*events)[1] == actions


def test_the_first_failure_in_time_decides():
    state, _ = replay((1, WorkerEnded(2, failed=True)), (2, WorkerEnded(0, failed=True)))
    assert state.first_failure == 2
    assert state.ended_by is None


def test_a_failure_after_a_signal_is_the_signals_doing():
    state, _ = replay((1, SignalArrived(TERM)), (2, WorkerEnded(0, failed=True)))
    assert state.first_failure is None
    assert state.ended_by == TERM


def test_a_signal_after_a_failure_changes_no_verdict():
    state, _ = replay((1, WorkerEnded(0, failed=True)), (2, SignalArrived(TERM)))
    assert (state.first_failure, state.ended_by) == (0, None)


def test_a_stopped_worker_is_woken_to_end():
    _, actions = step(SupervisionState(grace_seconds=1, groups=frozenset({0})), SignalArrived(TERM), 0)
    assert actions == (groups(TERM, 0), groups(CONT, 0))


def test_without_deadlines_there_is_nothing_to_wake_up_for():
    state, _ = replay((1, SignalArrived(USR1)))
    assert state.next_deadline is None


def test_the_nearest_deadline_is_next():
    state, _ = replay((1, WorkerEnded(0, failed=False)), (3, SignalArrived(TERM)))
    assert state.next_deadline == 11


def test_states_are_never_changed_in_place():
    before = SupervisionState(grace_seconds=1, groups=frozenset({0}))
    step(before, LauncherGone(), 0)
    assert before == SupervisionState(grace_seconds=1, groups=frozenset({0}))


def test_a_job_chooses_its_ending_signals():
    state = SupervisionState(grace_seconds=1, groups=frozenset({0}), ending_signals=frozenset({int(INT), int(USR1)}))
    assert groups(USR1, 0) in step(state, SignalArrived(USR1), 0)[1]
    assert step(state, SignalArrived(USR1), 0)[0].ended_by == USR1
    assert step(state, SignalArrived(TERM), 0)[1] == (groups(TERM, 0),)
    assert step(state, SignalArrived(TERM), 0)[0].ended_by is None


@pytest.mark.parametrize(("number", "asked"), [(INT, True), (TERM, True), (USR1, False)])
def test_a_signal_that_asks_for_the_end_is_remembered(number, asked):
    failed = (1, WorkerEnded(0, failed=True))
    assert replay((1, SignalArrived(number)))[0].end_requested == asked
    assert replay(failed, (2, SignalArrived(number)))[0].end_requested == asked
    chosen = SupervisionState(grace_seconds=1, groups=frozenset({0}), ending_signals=frozenset({int(INT)}))
    assert step(chosen, SignalArrived(number), 0)[0].end_requested == asked


def test_a_failure_is_no_wish_to_end():
    assert not replay((1, WorkerEnded(0, failed=True)))[0].end_requested
