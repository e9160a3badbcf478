"""Arrivals and ends -> the missing workers, and when a notice names them."""

import errno

import pytest

from cpulaunch.launch.monitor.start_barrier import (
    NOTICE_SECONDS,
    BarrierState,
    StartBarrier,
    overdue_notice,
    with_arrivals,
    without_worker,
)
from cpulaunch.launch.process import run_directory
from cpulaunch.launch.process.exec_spec import NOT_INHERITED
from cpulaunch.system.files import writing
from cpulaunch.worker.reporting import barrier
from cpulaunch.worker.reporting import process_identity as origin


def missing(*events, workers=3):
    state = BarrierState(missing=frozenset(range(workers)))
    for event in events:
        state = with_arrivals(state, event, 0) if isinstance(event, bytes) else without_worker(state, event)
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
        ([b"9" * 5000 + b"\n0\n"], {1, 2}),  # More digits than int() takes.
    ],
)
def test_a_worker_that_arrived_or_ended_is_not_missing(events, left):
    assert missing(*events) == left


def test_one_notice_names_the_missing_after_a_while():
    state = with_arrivals(BarrierState(missing=frozenset({0, 1, 3})), b"1\n", 100)
    assert overdue_notice(state, 100 + NOTICE_SECONDS - 1) == (state, None)
    noticed, line = overdue_notice(state, 100 + NOTICE_SECONDS)
    assert line == "start barrier: still waiting for workers 0,3 (cpulaunch.ready(), or the first forward)"
    later = with_arrivals(noticed, b"0\n", 500)
    assert overdue_notice(later, 1000) == (later, None)


def test_no_notice_comes_before_the_first_arrival():
    state = BarrierState(missing=frozenset({0, 1}))
    assert overdue_notice(state, 1e9) == (state, None)


def test_both_sides_use_the_same_names():
    assert (run_directory.ARRIVALS, run_directory.GATE) == (barrier.ARRIVALS, barrier.GATE)
    assert origin.MARK in dict(NOT_INHERITED)


def test_a_worker_arrives_where_no_file_can_be_made(tmp_path, monkeypatch):
    """As without inodes: else the others would wait for as long as it runs."""
    launch = StartBarrier(str(tmp_path), frozenset({0, 1}))

    def no_inode(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "create", no_inode)
    assert barrier._arrive(str(tmp_path / "worker-1.jsonl"))
    launch.serve(0.0)
    assert launch.state.missing == frozenset({0})
    launch.close()


def test_only_the_first_process_of_a_worker_arrives(tmp_path):
    launch = StartBarrier(str(tmp_path), frozenset({0}))
    assert [barrier._arrive(str(tmp_path / "worker-0.jsonl")) for _ in range(2)] == [True, False]
    launch.close()
