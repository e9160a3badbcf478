"""On which CPUs the helper process computes: idle ones, unless none ever is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpulaunch.worker.fusion import helper

STAT = """cpu  60 0 0 140 0 0 0 0 0 0
cpu0 10 0 0 90 0 0 0 0 0 0
cpu1 50 10 10 20 5 1 2 2 7 0
cpu10 1 1 1 1 1 1 1 1 1 1
intr 5 6
"""


def test_ticks_of_the_chosen_cpus_are_added(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(STAT)
    assert helper.idle_and_total([0, 1], str(tmp_path / "stat")) == (115, 200)
    assert helper.idle_and_total([1], str(tmp_path / "stat")) == (25, 100)
    assert helper.idle_and_total([7], str(tmp_path / "stat")) == (0, 0)


@pytest.mark.parametrize("text", [None, "cpu0 10 0\n", "cpu0 a b c d e f g h\n"])
def test_an_unreadable_file_says_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert helper.idle_and_total([0], str(tmp_path / "stat")) == (0, 0)


def test_the_share_is_that_of_the_time_between() -> None:
    assert helper.idle_share((100, 1000), (130, 1200)) == 0.15
    assert helper.idle_share((0, 0), (0, 0)) == 1.0


@pytest.mark.parametrize(
    ("are_idle", "policy", "priority"),
    [(True, os.SCHED_IDLE, helper.LEAST_PRIORITY), (False, os.SCHED_OTHER, helper.SOME_PRIORITY)],
)
def test_the_work_yields_cpus_to_others(are_idle: bool, policy: int, priority: int) -> None:
    pid = os.fork()
    if pid == 0:
        os.nice(-os.nice(0)) if os.geteuid() == 0 else None
        before = os.nice(0)
        helper.yield_cpus(are_idle=are_idle)
        expected = min(19, before + priority)
        os._exit(0 if (os.sched_getscheduler(0), os.nice(0)) == (policy, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
