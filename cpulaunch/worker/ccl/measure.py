"""A program that measures the time of an all-reduce over gloo and over ccl, for `--dist-backend auto`.

Usage: `python -m cpulaunch.worker.ccl.measure LAUNCHER CPUS SIZES`. LAUNCHER is the id of the parent process; CPUS has
the CPUs of each rank to fork, "0-3;4-7" (an empty entry: not bound); SIZES are bytes, "1048576,26214400". The last line
of stdout is the result: {"times": [[bytes, gloo seconds, ccl seconds], …]} or {"failed": "why"}.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from time import perf_counter
from typing import Any

from cpulaunch.records.cpulist import parse_cpulist
from cpulaunch.system.files.shared_memory import remove_shared_memory, remove_usual_names
from cpulaunch.system.libc import die_with_parent
from cpulaunch.system.loopback_store import on_loopback

BUDGET_SECONDS = 1.0
"""Time for all sizes together; MIN_ROUNDS may take longer."""
MIN_ROUNDS, MAX_ROUNDS, WARMUP_ROUNDS = 3, 50, 2
"""Fewest and most measured rounds for each size, and the unmeasured rounds before them."""
TIMEOUT = timedelta(seconds=20)


def main(arguments: Sequence[str]) -> int:
    """The exit code.

    Effect: writes the result to stdout. All ranks have exited on return, and also after SIGTERM or the launcher's exit.
    """
    launcher, cpu_lists, sizes = arguments
    ranks, asked, measures = set[int](), list[int](), False

    def end(number: int, _: object) -> None:
        """Effect: ends this process; once it forks ranks, ends these instead, as it has to remove their memory then."""
        asked.append(number)
        if not measures:
            sys.exit(128 + number)
        _kill(ranks)

    signal.signal(signal.SIGTERM, end)
    die_with_parent(signal.SIGTERM, parent=os.getppid())
    if os.getppid() != int(launcher):
        return 1
    from torch.distributed import TCPStore  # Imported once, before the ranks are forked.

    cpus = [parse_cpulist(cpu_list) for cpu_list in cpu_lists.split(";")]
    store = on_loopback(TCPStore)("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    since, measures = time.time(), True
    try:
        for rank in range(len(cpus)):
            ranks.add(fork_rank(rank, cpus, [int(size) for size in sizes.split(",")], port=store.port))
            if asked:
                break
        if asked:  # The signal may have come before the id of a rank was known.
            _kill(ranks)
        code = wait_for(ranks, since=since)
        return 128 + asked[0] if asked else code
    finally:
        _kill(ranks)
        wait_for(ranks, since=since)


def wait_for(ranks: set[int], *, since: float) -> int:
    """0 if all ranks succeeded, else 1.

    Effect: waits for the ranks and removes their shared memory; kills the others when one fails. `since`: when they
    started, in Unix seconds.
    """
    failed = False
    dead = set[int]()
    while ranks:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None  # Only WNOHANG makes it None.
        remove_usual_names(frozenset({ended.si_pid}), since=since)
        dead.add(ended.si_pid)
        ranks.discard(ended.si_pid)
        os.waitpid(ended.si_pid, 0)
        if ended.si_status and not failed:
            failed = True
            _kill(ranks)
    remove_shared_memory(frozenset(dead), since=since)  # Other ranks used it when these ended.
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
        die_with_parent(signal.SIGKILL, parent=parent)
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
    store = on_loopback(dist.TCPStore)("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    register_best(TorchSettings())
    groups = (dist.group.WORLD, dist.new_group(backend="ccl", timeout=TIMEOUT))

    def timed(tensor: torch.Tensor, group: Any) -> float:
        dist.barrier()
        start = perf_counter()
        dist.all_reduce(tensor, group=group)
        return perf_counter() - start

    measured = []
    for count in sizes:
        tensor = torch.zeros(max(1, count // 4))
        warm = [[timed(tensor, group) for group in groups] for _ in range(WARMUP_ROUNDS)]
        fitting = int(BUDGET_SECONDS / len(sizes) / sum(warm[-1]))
        rounds = torch.tensor(max(MIN_ROUNDS, min(MAX_ROUNDS, fitting)))
        dist.broadcast(rounds, 0)
        times = [[timed(tensor, group) for group in groups] for _ in range(int(rounds))]  # Alternately.
        gloo, ccl = (median(column) for column in zip(*times, strict=True))
        measured.append((count, gloo, ccl))
    dist.barrier()
    return measured


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
