"""One rank of scripts/bench/overlap: a batch for which backward and communication take equally long, then all timed.

Rank 0 prints one JSON object: {"batch": N, "path": …, "times": {"compute" | "backward" | "communication" | "step":
[seconds, a round each]}}.
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
from torch.nn.parallel import DistributedDataParallel

import cpulaunch.ccl  # noqa: F401 - registers the backend

BUCKET_MB = 5.0
TRIED_BATCHES, TRIES = (8, 64), 3


class Training:
    """A network of linear layers, wrapped for a group, and the parts of its steps."""

    def __init__(self, width: int, layers: int, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        self._network = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
        )
        self._group, self._width = group, width
        self.inputs = torch.randn(1, width)
        for _ in range(2):  # DDP arranges its buckets anew after the first step.
            self.step()
        said = self._network._get_ddp_logging_data()
        sizes = said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]
        self._buckets = [torch.zeros(int(size) // 4) for size in str(sizes).split(", ")]

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
        """All-reduces of the buckets of a step, at once."""
        for work in [dist.all_reduce(bucket, group=self._group, async_op=True) for bucket in self._buckets]:
            work.wait()


def usual_seconds(call: Callable[[], object]) -> float:
    """What a call takes on the slowest rank, undisturbed."""
    calls = calls_in_a_round(call)
    return agreed(min(seconds_a_call(call, calls) for _ in range(TRIES)), dist.ReduceOp.MAX)


def backward_seconds(training: Training, batch: int) -> float:
    training.use_batch(batch)
    return usual_seconds(training.compute) - usual_seconds(training.forward)


def main(way: str, width: int, layers: int, rounds: int, cpus: list[list[int]]) -> None:
    join(set(cpus[int(os.environ["RANK"])]))
    group, path = (dist.group.WORLD, "") if way == "gloo" else ccl_group("auto")
    training = Training(width, layers, group)  # type: ignore[arg-type]
    measured = {batch: backward_seconds(training, batch) for batch in TRIED_BATCHES}
    batch = balanced_batch(measured, usual_seconds(training.communicate))
    training.use_batch(batch)
    parts = {"forward": training.forward, "compute": training.compute, "communication": training.communicate}
    times = time_ways(parts | {"step": training.step}, rounds)
    if dist.get_rank() == 0:
        print(json.dumps({"batch": batch, "path": path, "times": times}))
    dist.destroy_process_group()


main(*json.loads(sys.argv[1]))
