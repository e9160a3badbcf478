"""Trains a small model on all ranks and writes down what each rank saw: losses, weights, its cores."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, weights = torch.randn(64, 8), torch.randn(8, 1)
mine = slice(rank * 64 // world, (rank + 1) * 64 // world)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs[mine]), (inputs @ weights)[mine])
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(float(mean) / world)
with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
    cpus = sorted(os.sched_getaffinity(0))
    json.dump({"losses": losses, "weights": model.module.weight.tolist(), "cpus": cpus}, file)
dist.destroy_process_group()
# As Python ends, a thread of gloo's that lets go of its last tensor aborts the process now and then (torch 2.13):
# https://github.com/pytorch/pytorch/pull/179291.
os._exit(0)
