"""Trains a small model with DDP over gloo and prints one line of JSON per rank: who it is, where it runs, what it got.

`FAILING_RANK=N` in the environment: that rank ends with code 7 instead, after the group has met.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if os.environ.get("FAILING_RANK") == str(rank):
        return 7
    torch.manual_seed(rank)  # DDP makes the weights equal.
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 4)
    losses = []
    for _ in range(20):
        loss = (model(data) - data.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    answer = {name: os.environ.get(name) for name in TOLD} | {
        "cpus": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "host": os.uname().nodename,
        "learned": losses[-1] < losses[0] / 4,
        "weights": weights,
    }
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    # As Python ends, a thread of gloo's that lets go of its last tensor aborts the process now and then (torch 2.13):
    # https://github.com/pytorch/pytorch/pull/179291.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
