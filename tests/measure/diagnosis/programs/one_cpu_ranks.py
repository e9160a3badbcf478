"""Two ranks that are both bound to the first CPU, beside which another one is idle."""

import os
import sys

import torch
from torch import distributed, multiprocessing, nn


def train(rank, port):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.rand(512, 512), torch.randint(0, 10, (512,))
    for _ in range(10_000):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
        optimizer.step()


if __name__ == "__main__":
    multiprocessing.spawn(train, args=(sys.argv[1],), nprocs=2)
