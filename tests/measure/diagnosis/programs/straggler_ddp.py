"""Two ranks of DistributedDataParallel with two threads each, of which one has far more work in every step."""

import os
import sys

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = 4096 if rank == 1 else 32
    for _ in range(10_000):
        optimizer.zero_grad()
        model(torch.rand(rows, 512)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    multiprocessing.spawn(train, args=(sys.argv[1],), nprocs=2)
