"""A limit on the CPU time of code: that time counts alone, whatever signals arrive."""

import os
import signal
import time

import pytest

from cpulaunch.system.time_limit import NUMBER, OutOfTimeError, cpu_time_limit


def work(seconds):
    """Effect: takes this CPU time, and sends this process the signal of the timer at its start."""
    os.kill(os.getpid(), NUMBER)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_signal_of_another_process_ends_nothing():
    before = signal.getsignal(NUMBER)
    with cpu_time_limit(100):
        work(0.01)
    assert signal.getsignal(NUMBER) == before


def test_a_signal_of_another_process_prolongs_nothing():
    with pytest.raises(OutOfTimeError), cpu_time_limit(0.05):
        work(10)


@pytest.mark.parametrize("signals", [1, 10_000])
def test_a_flood_of_signals_of_another_process_ends_nothing(monkeypatch, signals):
    """One comes whenever the time is read: before the limit is set, and while the one before is handled."""
    left = [signals]
    thread_time = time.thread_time

    def interrupted():
        if left[0]:
            left[0] -= 1
            os.kill(os.getpid(), NUMBER)
        return thread_time()

    monkeypatch.setattr(time, "thread_time", interrupted)
    with cpu_time_limit(100):
        os.kill(os.getpid(), NUMBER)
    assert left[0] < signals
