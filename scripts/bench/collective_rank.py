"""One rank of scripts/bench/collectives: each round times gloo, both paths of the ccl backend, and oneCCL's C API.

Rank 0 prints one JSON object: {"path": …, "reduce": {bytes: {way: [seconds a call, a round each]}},
"others": {name: …}, "step": {width: …},
"losses": {width: {way: {"steps": N, "difference": largest relative difference from gloo's}}}}.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from collective_tables import largest_difference
from rank_timing import agreed, ccl_group, checked, join, time_ways
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cpulaunch.ccl  # noqa: F401 - registers the backend
from cpulaunch.worker.ccl.oneccl import library
from cpulaunch.worker.ccl.wire.reductions import FLOAT32, SUM

LAYERS, BATCH = 8, 32
OTHERS_BYTES = 1 << 20
Ways = dict[str, Callable[[], object]]
Groups = dict[str, dist.ProcessGroup]


def bare_communicator() -> library.Communicator:
    """A communicator of its own, called from this thread."""
    told = [library.unique_id() if dist.get_rank() == 0 else b""]
    dist.broadcast_object_list(told, 0)
    return library.Communicator(told[0], rank=dist.get_rank(), size=dist.get_world_size())


def reduce_ways(size_bytes: int, groups: Groups, bare: library.Communicator | None) -> Ways:
    """Way -> all-reduce of so many bytes. Effect: each was done once. Raises: RuntimeError if a sum is wrong."""
    tensor = torch.zeros(size_bytes // 4)

    def over(group: dist.ProcessGroup) -> Callable[[], object]:
        return lambda: dist.all_reduce(tensor, group=group)

    ways: Ways = {name: over(group) for name, group in groups.items()}
    if bare is not None:
        address = tensor.data_ptr()
        ways["bare"] = lambda: bare.run("AllReduce", address, address, tensor.numel(), FLOAT32, SUM)
    ranks = dist.get_world_size()
    checked(ways, tensor, mine=dist.get_rank() + 1, expected=ranks * (ranks + 1) / 2)
    return ways


def other_ways(groups: Groups) -> dict[str, Ways]:
    """Collective -> way -> call, for 1 MiB: what is gathered or scattered is 1 MiB in all."""
    # Not zeros: unwritten pages, such as those of a broadcast source, all map to one zero page.
    whole = torch.ones(OTHERS_BYTES // 4 // dist.get_world_size() * dist.get_world_size())
    part = torch.ones(whole.numel() // dist.get_world_size())

    def all_of(call: Callable[[dist.ProcessGroup], object]) -> Ways:
        return {name: lambda group=group: call(group) for name, group in groups.items()}  # type: ignore[misc]

    return {
        "broadcast": all_of(lambda group: dist.broadcast(whole, 0, group=group)),
        "all_gather_into_tensor": all_of(lambda group: dist.all_gather_into_tensor(whole, part, group=group)),
        "reduce_scatter_tensor": all_of(lambda group: dist.reduce_scatter_tensor(part, whole, group=group)),
        "barrier": all_of(lambda group: dist.barrier(group=group)),
    }


def step(
    width: int, group: dist.ProcessGroup, losses: list[torch.Tensor], *, exchanges: bool = True
) -> Callable[[], object]:
    """A training step, always of the same network and data; it adds its loss to the losses.

    One that exchanges nothing does all else that DistributedDataParallel does.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
    network = DistributedDataParallel(model, process_group=group)
    if not exchanges:
        network.register_comm_hook(None, nothing)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    inputs = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(1 + dist.get_rank()))

    def one() -> None:
        optimizer.zero_grad()
        loss = (network(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    return one


def nothing(_, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations that are texts
    """Instead of an all-reduce: a future of this rank's gradients as they are."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def compared(losses: dict[str, list[torch.Tensor]]) -> dict[str, dict[str, float]]:
    """Way -> how far its losses are from gloo's, the worst of all ranks, after as many steps as all ways did."""
    steps = min(map(len, losses.values()))
    numbers = {way: [float(loss) for loss in each[:steps]] for way, each in losses.items()}
    return {
        way: {"steps": steps, "difference": agreed(largest_difference(each, numbers["gloo"]), dist.ReduceOp.MAX)}
        for way, each in numbers.items()
        if way != "gloo"
    }


def main(sizes: list[int], widths: list[int], rounds: int, spins: bool) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives.
    cpus = sorted(os.sched_getaffinity(0))
    join({cpus[int(os.environ["RANK"]) % len(cpus)]})
    group, path = ccl_group("auto")
    groups: Groups = {"gloo": dist.group.WORLD, "ccl": group}  # type: ignore[dict-item]
    if spins and path != "oneccl":
        groups["oneccl"] = ccl_group("oneccl")[0]
    bare = bare_communicator() if spins else None
    reduce = {size: time_ways(reduce_ways(size, groups, bare), rounds) for size in sizes}
    others = {name: time_ways(ways, rounds) for name, ways in other_ways(groups).items()} if sizes else {}
    steps, losses = {}, {}
    for width in widths:
        seen: dict[str, list[torch.Tensor]] = {way: [] for way in groups}
        ways: Ways = {way: step(width, groups[way], seen[way]) for way in groups}
        ways["none"] = step(width, groups["gloo"], [], exchanges=False)
        steps[width] = time_ways(ways, rounds)
        losses[width] = compared(seen)
    if dist.get_rank() == 0:
        print(json.dumps({"path": path, "reduce": reduce, "others": others, "step": steps, "losses": losses}))
    if bare is not None:
        bare.close()
    dist.destroy_process_group()


main(*json.loads(sys.argv[1]))
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process whose groups live until Python ends (seen with torch 2.13).
