"""Arrivals and ends -> who is missing, and when to ask for them."""

import pytest

from cpulaunch.launch.monitor.start_barrier import PATIENCE_SECONDS, Waiting, arrive, ask, give_up_on
from cpulaunch.launch.process import run_directory
from cpulaunch.launch.process.exec_spec import NOT_INHERITED
from cpulaunch.worker.reporting import barrier
from cpulaunch.worker.reporting import process_identity as origin


def missing(*events, workers=3):
    state = Waiting(missing=frozenset(range(workers)))
    for event in events:
        state = arrive(state, event, 0) if isinstance(event, bytes) else give_up_on(state, event)
    return state.missing


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ([], {0, 1, 2}),
        ([b"0\n"], {1, 2}),
        ([b"0\n2\n1\n"], set()),
        ([b"1\n", b"1\n"], {0, 2}),
        ([1], {0, 2}),
        ([b"0\n", 1, 2], set()),
        ([0, b"0\n"], {1, 2}),
        ([b"7\nx\n\n-1\n"], {0, 1, 2}),
    ],
)
def test_who_arrived_or_ended_is_not_missing(events, left):
    assert missing(*events) == left


def test_once_after_a_while_those_who_wait_ask():
    state = arrive(Waiting(missing=frozenset({0, 1, 3})), b"1\n", 100)
    assert ask(state, 100 + PATIENCE_SECONDS - 1) == (state, None)
    asked, line = ask(state, 100 + PATIENCE_SECONDS)
    assert line == "start barrier: still waiting for worker 0,3 (cpulaunch.ready(), or its first forward)"
    later = arrive(asked, b"0\n", 500)
    assert ask(later, 1000) == (later, None)


def test_nobody_asks_before_anybody_waits():
    state = Waiting(missing=frozenset({0, 1}))
    assert ask(state, 1e9) == (state, None)


def test_both_sides_use_the_same_names():
    assert (run_directory.ARRIVALS, run_directory.GATE) == (barrier.ARRIVALS, barrier.GATE)
    assert origin.MARK in dict(NOT_INHERITED)
