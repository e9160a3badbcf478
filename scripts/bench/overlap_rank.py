"""One rank of scripts/bench/overlap: a batch for which backward and communication take equally long, then all timed.

Rank 0 prints one JSON object: {"batch": N, "path": …, "times": {"forward" | "compute" | "communication" | "step":
[seconds, a round each]}}; compute is forward and backward.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from overlap_tables import balanced_batch
from rank_timing import agreed, calls_in_a_round, ccl_group, join, seconds_a_call, time_ways
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import cpulaunch.ccl  # noqa: F401 - registers the backend

BUCKET_MB = 5.0
ARRANGING = 2
"""DDP arranges its buckets anew after the first step."""
TRIED_BATCHES, TRIES = (8, 64), 3


class Training:
    """A network of linear layers, wrapped for a group, and the parts of its steps."""

    def __init__(self, width: int, layers: int, group: dist.ProcessGroup) -> None:
        self._group, self._width = group, width
        self.inputs = torch.randn(1, width)
        self._buckets = self._buckets_of(self._wrapped(layers))
        self._network = self._wrapped(layers)
        for _ in range(ARRANGING):
            self.step()

    def _wrapped(self, layers: int) -> DistributedDataParallel:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(self._width, self._width) for _ in range(layers)])
        return DistributedDataParallel(
            model, process_group=self._group, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
        )

    def _buckets_of(self, network: DistributedDataParallel) -> list[torch.Tensor]:
        """Tensors like those that a step of the network reduces, in that order."""
        seen: list[int] = []

        def note(_: object, bucket):  # type: ignore[no-untyped-def] # torch compares annotations as they are
            seen.append(bucket.buffer().numel())
            return allreduce_hook(self._group, bucket)

        network.register_comm_hook(None, note)
        for _ in range(ARRANGING):
            seen.clear()
            network(self.inputs).sum().backward()
        return [torch.zeros(count) for count in seen]

    def use_batch(self, size: int) -> None:
        """Effect: steps are of so many samples."""
        self.inputs = torch.randn(size, self._width)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self._network(self.inputs).square().mean()
        return loss

    def step(self) -> None:
        """Forward, and backward with the communication that DDP hides in it."""
        self._network.zero_grad(set_to_none=True)
        self.loss().backward()

    def compute(self) -> None:
        """Forward and backward, and no communication."""
        self._network.zero_grad(set_to_none=True)
        with self._network.no_sync():
            self.loss().backward()

    def forward(self) -> None:
        """Forward alone."""
        with self._network.no_sync():
            self.loss()

    def communicate(self) -> None:
        """All-reduces of the buckets of a step, at once, and waited for as DDP does, which does none of them itself."""
        works = [dist.all_reduce(bucket, group=self._group, async_op=True) for bucket in self._buckets]
        for future in [work.get_future() for work in works]:
            future.wait()


class Partner(Training):
    """A rank that takes part in the communication of the others' steps, and computes nothing meanwhile."""

    def start_resting(self) -> None:
        """Effect: from now on its steps are their communication alone."""
        self.step = self.communicate  # type: ignore[method-assign]
        self.compute = self.forward = lambda: None  # type: ignore[method-assign]


def usual_seconds(call: Callable[[], object]) -> float:
    """What a call takes on the slowest rank, undisturbed."""
    calls = calls_in_a_round(call)
    return agreed(min(seconds_a_call(call, calls) for _ in range(TRIES)), dist.ReduceOp.MAX)


def backward_seconds(training: Training, batch: int) -> float:
    training.use_batch(batch)
    return usual_seconds(training.compute) - usual_seconds(training.forward)


def main(way: str, sizes: tuple[int, int], rounds: int, cpus: list[list[int]], computing: int) -> None:
    """`sizes`: width and layers; the first `computing` ranks compute."""
    join(set(cpus[int(os.environ["RANK"])]))
    group, path = (dist.group.WORLD, "") if way == "gloo" else ccl_group("auto")
    training = (Training if dist.get_rank() < computing else Partner)(*sizes, group)  # type: ignore[arg-type]
    if isinstance(training, Partner):
        training.start_resting()
    measured = {batch: backward_seconds(training, batch) for batch in TRIED_BATCHES}
    batch = balanced_batch(measured, usual_seconds(training.communicate))
    training.use_batch(batch)
    parts = {"forward": training.forward, "compute": training.compute, "communication": training.communicate}
    times = time_ways(parts | {"step": training.step}, rounds)
    if dist.get_rank() == 0:
        print(json.dumps({"batch": batch, "path": path, "times": times}))
    dist.destroy_process_group()


main(*json.loads(sys.argv[1]))
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process whose groups live until Python ends (seen with torch 2.13).
