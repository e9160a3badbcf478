"""A program that measures the time of an all-reduce over gloo and over ccl, for `--dist-backend auto`.

Usage: `python -m cpulaunch.worker.ccl.measure LAUNCHER CPUS SIZES`. LAUNCHER is the id of the parent process; CPUS has
the CPUs of each rank to fork, "0-3;4-7" (an empty entry: not bound); SIZES are bytes, "1048576,26214400". The last line
of stdout is the result: {"times": [[bytes, gloo seconds, ccl seconds], …]} or {"failed": "why"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta
from statistics import median
from time import perf_counter

from cpulaunch.records.cpulist import parse_cpulist
from cpulaunch.system.files.shared_memory import remove_shared_memory
from cpulaunch.system.loopback_store import on_loopback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any, NoReturn

BUDGET_SECONDS = 1.0
"""Time for all sizes together; MIN_ROUNDS may take longer."""
MIN_ROUNDS, MAX_ROUNDS, WARMUP_ROUNDS = 3, 50, 2
"""Fewest and most measured rounds for each size, and the unmeasured rounds before them."""
TIMEOUT = timedelta(seconds=20)
PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def main(arguments: Sequence[str]) -> int:
    """The exit code.

    Effect: writes the result to stdout. All ranks have exited on return, and also after SIGTERM or the launcher's exit.
    """
    launcher, cpu_lists, sizes = arguments
    signal.signal(signal.SIGTERM, _exit_on_signal)
    end_with(int(launcher), signal.SIGTERM)
    from torch.distributed import TCPStore  # Imported once, before the ranks are forked.

    cpus = [parse_cpulist(cpu_list) for cpu_list in cpu_lists.split(";")]
    store = on_loopback(TCPStore)("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    ranks: set[int] = set()
    since = time.time()
    try:
        for rank in range(len(cpus)):
            ranks.add(fork_rank(rank, cpus, [int(size) for size in sizes.split(",")], port=store.port))
        return wait_for(ranks, since=since)
    finally:
        _kill(ranks)
        wait_for(ranks, since=since)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Raises: SystemExit, so that `main` kills the ranks and removes their shared memory before this process exits."""
    sys.exit(128 + number)


def end_with(parent: int, number: int) -> None:
    """Effect: the kernel signals this process when its parent exits; exits at once if the parent already has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def wait_for(ranks: set[int], *, since: float) -> int:
    """0 if all ranks succeeded, else 1.

    Effect: waits for the ranks and removes their shared memory; kills the others when one fails. `since`: when they
    started, in Unix seconds.
    """
    failed = False
    left = set[int]()
    while ranks:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None  # Only WNOHANG makes it None.
        left |= remove_shared_memory({ended.si_pid}, since=since)
        ranks.discard(ended.si_pid)
        os.waitpid(ended.si_pid, 0)
        if ended.si_status and not failed:
            failed = True
            _kill(ranks)
    remove_shared_memory(left, since=since)  # Other ranks used it when these ended.
    return int(failed)


def _kill(ranks: set[int]) -> None:
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)


def fork_rank(rank: int, cpus: Sequence[frozenset[int]], sizes: Sequence[int], *, port: int) -> int:
    """The process id of a forked rank, which measures, writes the result if it is rank 0, and exits."""
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
        times = _measure(rank, len(cpus), sizes, port=port)
        if rank == 0:
            _write_result({"times": times})
        code = 0
    except Exception as error:  # noqa: BLE001 - any error is the result
        _write_result({"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"})
    finally:
        os._exit(code)  # Exit handlers that imports have registered are for the parent to run.


def _write_result(result: dict[str, Any]) -> None:
    os.write(1, (json.dumps(result) + "\n").encode())


def _measure(rank: int, size: int, sizes: Sequence[int], *, port: int) -> list[tuple[int, float, float]]:
    """For each size in bytes: the size, and the median seconds of an all-reduce over gloo and over ccl."""
    import torch
    import torch.distributed as dist

    from cpulaunch.records.torch_settings import TorchSettings
    from cpulaunch.worker.ccl.registration import register_best

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(CCL_LOCAL_RANK=str(rank), CCL_LOCAL_SIZE=str(size))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    register_best(TorchSettings())
    groups = (dist.group.WORLD, dist.new_group(backend="ccl", timeout=TIMEOUT))
    measured = [(count, *_compare(groups, count, BUDGET_SECONDS / len(sizes))) for count in sizes]
    dist.barrier()
    return measured


def _compare(groups: tuple[Any, Any], count: int, seconds: float) -> tuple[float, float]:
    """Median seconds of an all-reduce of `count` bytes in each of the two groups, measured alternately."""
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
    """Seconds of one all-reduce."""
    import torch.distributed as dist

    dist.barrier()
    start = perf_counter()
    dist.all_reduce(tensor, group=group)
    return perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
