"""One rank of scripts/bench/collectives: each round times gloo, oneCCL's C API, and cpulaunch's backend over it.

Rank 0 prints one JSON object: {"reduce": {bytes: {way: [seconds a call, a round each]}}, "step": {width: …}}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cpulaunch.ccl  # noqa: F401 - registers the backend
from cpulaunch.worker.ccl import api

ROUND_SECONDS = 0.15
LAYERS, BATCH = 8, 32


def bare_communicator() -> api.Communicator:
    """A communicator of its own, called from this thread."""
    told = [api.unique_id() if dist.get_rank() == 0 else b""]
    dist.broadcast_object_list(told, 0)
    return api.Communicator(told[0], rank=dist.get_rank(), size=dist.get_world_size())


def seconds_a_call(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def calls_in_a_round(call: Callable[[], object], gloo: object) -> int:
    """The same on all ranks: as many as the slowest way does in a part of a second."""
    call()
    count = torch.tensor(max(3, min(200, int(ROUND_SECONDS / max(seconds_a_call(call, 3), 1e-6)))))
    dist.all_reduce(count, dist.ReduceOp.MIN, group=gloo)
    return int(count)


def time_ways(ways: dict[str, Callable[[], object]], rounds: int, gloo: object) -> dict[str, list[float]]:
    calls = {name: calls_in_a_round(call, gloo) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            dist.barrier(group=gloo)
            times[name].append(seconds_a_call(call, calls[name]))
    return times


def reduce_ways(size_bytes: int, gloo: object, bare: api.Communicator) -> dict[str, Callable[[], object]]:
    tensor = torch.zeros(size_bytes // 4)
    return {
        "gloo": lambda: dist.all_reduce(tensor, group=gloo),
        "ccl": lambda: dist.all_reduce(tensor),
        "bare": lambda: bare.all_reduce(tensor.data_ptr(), tensor.numel(), api.FLOAT32, api.SUM),
    }


def step(width: int, group: object) -> Callable[[], object]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
    network = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    inputs = torch.randn(BATCH, width)

    def one() -> None:
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()

    return one


def main(sizes: list[int], widths: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[int(os.environ["RANK"]) % len(cpus)]})
    dist.init_process_group("ccl")
    gloo, bare = dist.new_group(backend="gloo"), bare_communicator()
    reduce = {size: time_ways(reduce_ways(size, gloo, bare), rounds, gloo) for size in sizes}
    steps = {width: time_ways({"gloo": step(width, gloo), "ccl": step(width, None)}, rounds, gloo) for width in widths}
    if dist.get_rank() == 0:
        print(json.dumps({"reduce": reduce, "step": steps}), flush=True)
    bare.close()
    dist.destroy_process_group()


main(*json.loads(sys.argv[1]))
