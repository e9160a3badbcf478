"""Ranks of one host that are threads of one process."""

import mmap
import os
import threading

from cpulaunch.worker.ccl.memory.library import bytes_needed
from cpulaunch.worker.ccl.memory.path import MemoryPath
from cpulaunch.worker.ccl.wire.errors import CclError

SECONDS = 20.0


def groups_of(size, *, seconds=SECONDS):
    """Every rank's view of a new group."""
    memory, processes = mmap.mmap(-1, bytes_needed(size)), [os.getpid()] * size
    return [
        MemoryPath(memory, rank=rank, processes=processes, pidfds=[-1] * size, seconds=seconds) for rank in range(size)
    ]


def together(size, rank_does, *, number=0, seconds=SECONDS):
    """What `rank_does` returns, given each rank's path, or its CclError; `number` is that of the last barrier."""
    groups = groups_of(size, seconds=seconds)
    results = [None] * size

    def run(rank):
        try:
            results[rank] = rank_does(groups[rank], rank)
        except CclError as error:
            results[rank] = error

    for group in groups:
        group.native.number = group.slot(group.rank).count = number
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
