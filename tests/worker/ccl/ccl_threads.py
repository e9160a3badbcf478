"""Ranks of one host that are threads of one process."""

import mmap
import threading

from cpulaunch.worker.ccl.memory.native import NativeBarrier, load
from cpulaunch.worker.ccl.memory.shared_barrier import SharedBarrier, bytes_needed
from cpulaunch.worker.ccl.wire.errors import CclError
from cpulaunch.worker.ccl.wire.reductions import describe_call

SECONDS = 20.0
LIBRARY = load()
KINDS = ["python"] if LIBRARY is None else ["python", "native", "mixed"]
"""Kinds of ranks: Python alone and, if cpulaunch was installed with a compiler, native alone and both in one group."""


def barrier_of(kind, memory, rank, size):
    if kind == "native" or (kind == "mixed" and rank % 2 == 0):
        return NativeBarrier(LIBRARY, memory, rank=rank, size=size, describe=describe_call)
    return SharedBarrier(memory, rank=rank, size=size, describe=describe_call)


def together(size, rank_does, *, number=0, kind="python"):
    """What `rank_does` returns in each of `size` ranks, or its CclError; the first barrier has the given `number`."""
    memory = mmap.mmap(-1, bytes_needed(size))
    barriers = [barrier_of(kind, memory, rank, size) for rank in range(size)]
    results = [None] * size

    def run(rank):
        try:
            results[rank] = rank_does(barriers[rank])
        except CclError as error:
            results[rank] = error

    for barrier in barriers:
        barrier._number = number
        barrier._counts[barrier.rank].value = number
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for barrier in barriers:
        barrier.close()
    return results
