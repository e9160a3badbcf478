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
