"""Signals that arrive together count as the kernel counts pending ones."""

import signal

import pytest

from cpulaunch.system.signals import SIGCONT, SIGINT, SIGTERM, SIGTSTP, merged, paused_after

OTHER = 10


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ([], []),
        ([OTHER] * 4096, [OTHER]),
        ([OTHER, SIGTERM] * 2000, [OTHER, SIGTERM]),
        ([SIGINT], [SIGINT]),
        ([SIGINT] * 9, [SIGINT, SIGINT]),
        ([OTHER, SIGINT, OTHER, SIGINT, OTHER], [OTHER, SIGINT, SIGINT]),
        ([int(signal.SIGRTMIN) + 1] * 5, [int(signal.SIGRTMIN) + 1] * 5),
        ([SIGTSTP, SIGTSTP, SIGCONT, SIGCONT, SIGTSTP], [SIGTSTP, SIGCONT, SIGTSTP]),
    ],
)
def test_signals_that_arrive_together_are_merged(numbers, kept):
    assert merged(bytes(numbers)) == kept


@pytest.mark.parametrize(
    ("numbers", "paused"),
    [
        ([], [False, True]),
        ([OTHER], [False, True]),
        ([SIGTSTP], [True, True]),
        ([SIGCONT, OTHER], [False, False]),
        ([SIGCONT, SIGTSTP, SIGCONT], [False, False]),
        ([SIGTSTP, SIGCONT, SIGTSTP, OTHER], [True, True]),
    ],
)
def test_the_last_signal_that_stops_or_continues_decides(numbers, paused):
    assert [paused_after(bytes(numbers), paused=before) for before in (False, True)] == paused
