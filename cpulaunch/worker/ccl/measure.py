"""What an all-reduce takes over gloo and over ccl, among ranks of this process's own: `--dist-backend auto` asks.

A program of its own: `python -m cpulaunch.worker.ccl.measure LAUNCHER CPUS SIZES`. LAUNCHER is the process that waits
for the answer; CPUS has each rank's, "0-3;4-7" ("": not bound); SIZES are bytes, "1048576,26214400". The last line of
stdout is the answer: {"times": [[bytes, gloo seconds, ccl seconds], …]} or {"failed": "why"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from datetime import timedelta
from statistics import median
from time import perf_counter

from cpulaunch.records.cpulist import parse_cpulist
from cpulaunch.system.shm_cleanup import remove_shared_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any, NoReturn

BUDGET_SECONDS = 1.0
"""For all sizes together, as far as the fewest rounds allow."""
MIN_ROUNDS, MAX_ROUNDS, WARMUP_ROUNDS = 3, 50, 2
"""Rounds that count for each size, and those before that do not."""
TIMEOUT = timedelta(seconds=20)
PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def main(arguments: Sequence[str]) -> int:
    """The exit code. Effect: the answer is on stdout; all ranks have ended, also on SIGTERM or without the launcher."""
    launcher, places, sizes = arguments
    signal.signal(signal.SIGTERM, _give_up)
    end_with(int(launcher), signal.SIGTERM)
    import torch  # noqa: F401 - once, before the ranks are forked

    cpus = [parse_cpulist(place) for place in places.split(";")]
    read, write = os.pipe()
    ranks: set[int] = set()
    try:
        for rank in range(len(cpus)):
            ranks.add(fork_rank(rank, cpus, [int(size) for size in sizes.split(",")], port_pipe=(read, write)))
        return wait_for(ranks)
    finally:
        _kill(ranks)
        wait_for(ranks)


def _give_up(number: int, frame: FrameType | None) -> NoReturn:
    """A rank that is killed cannot tidy up after itself: its parent has to live longer."""
    sys.exit(128 + number)


def end_with(parent: int, number: int) -> None:
    """Effect: this process gets a signal when its parent ends; it ends at once if that has already happened."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def wait_for(ranks: set[int]) -> int:
    """0 if all ranks succeeded, else 1. Effect: the first that fails ends the others; nothing of them is left."""
    failed = False
    while ranks:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None  # Only WNOHANG makes it None.
        remove_shared_memory(ended.si_pid)
        ranks.discard(ended.si_pid)
        os.waitpid(ended.si_pid, 0)
        if ended.si_status and not failed:
            failed = True
            _kill(ranks)
    return int(failed)


def _kill(ranks: set[int]) -> None:
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)


def fork_rank(rank: int, cpus: Sequence[frozenset[int]], sizes: Sequence[int], *, port_pipe: tuple[int, int]) -> int:
    """The process id of a rank that measures and ends."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with(parent, signal.SIGKILL)
        if cpus[rank]:
            os.sched_setaffinity(0, cpus[rank])
        times = _measure(rank, len(cpus), sizes, port_pipe=port_pipe)
        if rank == 0:
            _say({"times": times})
        code = 0
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        _say({"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"})
    finally:
        os._exit(code)  # What an import has registered for the end is the parent's.


def _say(answer: dict[str, Any]) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


def _measure(
    rank: int, size: int, sizes: Sequence[int], *, port_pipe: tuple[int, int]
) -> list[tuple[int, float, float]]:
    """Median seconds of an all-reduce of each size over gloo and over ccl."""
    import torch
    import torch.distributed as dist

    from cpulaunch.records.torch_settings import TorchSettings
    from cpulaunch.worker.ccl.registration import register_best

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(CCL_LOCAL_RANK=str(rank), CCL_LOCAL_SIZE=str(size))
    store = _rendezvous(rank, size, port_pipe)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    register_best(TorchSettings())
    groups = (dist.group.WORLD, dist.new_group(backend="ccl", timeout=TIMEOUT))
    measured = [(count, *_compare(groups, count, BUDGET_SECONDS / len(sizes))) for count in sizes]
    dist.barrier()
    return measured


def _rendezvous(rank: int, size: int, port_pipe: tuple[int, int]) -> Any:
    """The ranks' store, in the first of them; the others are told its port."""
    from torch.distributed import TCPStore

    read, write = port_pipe
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        os.write(write, store.port.to_bytes(2, "little") * (size - 1))
        return store
    os.close(write)
    port = int.from_bytes(os.read(read, 2), "little")
    return TCPStore("127.0.0.1", port, size, is_master=False, timeout=TIMEOUT)


def _compare(groups: tuple[Any, Any], count: int, seconds: float) -> tuple[float, float]:
    """Median seconds of an all-reduce of so many bytes in each group, taken in turns."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(max(1, count // 4))
    warm = [[_time(tensor, group) for group in groups] for _ in range(WARMUP_ROUNDS)]
    rounds = torch.tensor(max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / sum(warm[-1])))))
    dist.broadcast(rounds, 0)
    times = [[_time(tensor, group) for group in groups] for _ in range(int(rounds))]
    gloo, ccl = (median(column) for column in zip(*times, strict=True))
    return gloo, ccl


def _time(tensor: Any, group: Any) -> float:
    import torch.distributed as dist

    dist.barrier()
    start = perf_counter()
    dist.all_reduce(tensor, group=group)
    return perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
