"""Two ranks that add up a large buffer after every small step."""

import os
import sys

import torch
from torch import distributed, multiprocessing, nn


def train(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(64, 1)
    statistics = torch.rand(8_000_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10_000):
        optimizer.zero_grad()
        model(torch.rand(32, 64)).square().mean().backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
        distributed.all_reduce(statistics, op=distributed.ReduceOp.MAX)
        optimizer.step()


if __name__ == "__main__":
    multiprocessing.spawn(train, args=(sys.argv[1],), nprocs=2)
