"""Timing of collectives inside a rank: each round measures every variant once, in the same order on all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from interleave import rotated

PATH_VARIABLE = "CPULAUNCH_CCL_PATH"
ROUND_SECONDS = 0.15


def join(cpus: set[int]) -> None:
    """Effect: initializes gloo as the default group; binds this rank, with one thread, to these CPUs."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cpus)
    dist.init_process_group("gloo")


def ccl_group(path: str) -> tuple[dist.ProcessGroup, str]:
    """A group of all ranks that uses this path of the ccl backend, and the path that it really uses."""
    os.environ[PATH_VARIABLE] = path
    group = dist.new_group(backend="ccl")
    return group, group.path


def checked(ways: Mapping[str, Callable[[], object]], tensor: torch.Tensor, *, mine: float, expected: float) -> None:
    """Effect: calls each way once on a tensor filled with `mine`, then fills it with zeros.

    Raises: RuntimeError if a result differs from `expected`.
    """
    for name, call in ways.items():
        tensor.fill_(mine)
        call()
        if not bool(tensor.eq(expected).all()):
            low, high = float(tensor.min()), float(tensor.max())
            raise RuntimeError(f"{name}: {tensor.nbytes} bytes are {low} to {high} instead of {expected}")
    tensor.zero_()


def seconds_a_call(call: Callable[[], object], calls: int) -> float:
    """Mean seconds per call over so many calls."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def agreed(number: float, operation: dist.ReduceOp.RedOpType) -> float:
    """Minimum, maximum or sum of a number over all ranks."""
    tensor = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return float(tensor)


def calls_in_a_round(call: Callable[[], object]) -> int:
    """Calls that the slowest rank can make in ROUND_SECONDS, between 3 and 200; equal on all ranks."""
    call()
    return int(agreed(max(3, min(200, int(ROUND_SECONDS / max(seconds_a_call(call, 3), 1e-6)))), dist.ReduceOp.MIN))


def time_ways(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Way -> seconds per call, one value for each round."""
    calls = {name: calls_in_a_round(call) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in rotated(list(ways), number):
            dist.barrier()
            times[name].append(seconds_a_call(ways[name], calls[name]))
    return times
