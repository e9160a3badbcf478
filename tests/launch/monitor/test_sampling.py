"""Snapshots of running workers, as the supervisor takes them."""

import os
import subprocess

from cpulaunch.launch.monitor.sampling import Sampler


def test_a_snapshot_that_cannot_be_understood_is_dropped():
    def take(pid, *, pages):
        raise ValueError("invalid literal for int()")

    now = [0.0]
    sampler = Sampler(lambda: now[0], take)
    now[0] = 100.0
    while sampler.deadline <= now[0]:
        sampler.sample({0: os.getpgid(0)})
    assert sampler.snapshots == {0: {}}
    assert sampler.deadline > 100.0


def test_what_is_done_between_snapshots_is_no_cost_of_theirs():
    """The memory of processes is looked at again once that takes a hundredth of the time."""
    walks, now = [], [0.0]

    def take(pid, *, pages):
        now[0] += 0.01
        walks.extend([now[0]] if pages else [])
        return {"pid": pid, "threads": [1], "rss_bytes": 5, "peak_memory_bytes": 5, "pages": {}}

    sampler = Sampler(lambda: now[0], take)
    while now[0] < 300.0:
        sampler.sample({0: os.getpgid(0)})
        now[0] += 1.0  # As output takes, or the other processes.
    assert len(walks) > 10


def test_other_events_are_handled_between_the_snapshots_of_a_sample():
    taken, now = [], [0.0]

    def take(pid, *, pages):
        taken.append(pid)
        return {"pid": pid, "threads": [1], "rss_bytes": 5, "peak_memory_bytes": 5, "pages": {}}

    sampler = Sampler(lambda: now[0], take)
    now[0] = 100.0
    with subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000 & echo; wait"], stdout=-1, process_group=0) as shell:
        shell.stdout.readline()
        counts = []
        while sampler.deadline <= now[0]:
            sampler.sample({0: shell.pid})
            counts.append(len(taken))
        os.killpg(shell.pid, 9)
    assert counts == [1, 2, 3, 3]
    assert len(set(taken)) == 3
    assert sampler.sizes == {0: {pid: [5] for pid in taken}}
