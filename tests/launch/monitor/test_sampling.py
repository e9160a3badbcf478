"""Snapshots of running workers, as the supervisor takes them."""

import os

from cpulaunch.launch.monitor.sampling import Sampler


def test_a_snapshot_that_cannot_be_understood_is_dropped():
    def take(pid, *, pages):
        raise ValueError("invalid literal for int()")

    now = [0.0]
    sampler = Sampler(lambda: now[0], take)
    now[0] = 100.0
    sampler.sample({0: os.getpgid(0)})
    assert sampler.snapshots == {0: {}}
    assert sampler.deadline > 100.0
