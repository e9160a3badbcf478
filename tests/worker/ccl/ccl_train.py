"""The same DDP job over several backends: `ccl_train.py [--fault FAULT] BACKEND…`. The default group uses the first.

Every rank prints a JSON line: its losses over each backend, and how the first backend moved its data.
"""

import argparse
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

TIMEOUT_SECONDS, STEPS, WIDTH = 120, 5, 64
RECEIVED = Path("/sys/class/net/up0/statistics/rx_bytes")


def losses(group):
    """The losses of this rank, step by step."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        inputs = torch.randn(32, WIDTH)
        loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), inputs.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def received_bytes(tensor):
    """Bytes received over the network interface of the tests while a tensor is reduced; 0 without the interface."""
    before = int(RECEIVED.read_text()) if RECEIVED.exists() else 0
    dist.all_reduce(tensor)
    return int(RECEIVED.read_text()) - before if RECEIVED.exists() else 0


def raises():
    if dist.get_rank() == 1:
        raise ValueError("this rank's own mistake")
    dist.all_reduce(torch.ones(4))


def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def report(backends):
    """The results of this rank."""
    tensor = torch.full((1 << 18,), float(dist.get_rank()))
    received = received_bytes(tensor)
    groups = [None, *(dist.new_group(backend=name) for name in backends[1:])]
    return {
        "rank": dist.get_rank(),
        "received": received,
        "sum": tensor.unique().tolist(),
        "losses": {name: losses(group) for name, group in zip(backends, groups, strict=True)},
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault")
    parser.add_argument("backends", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backends[0], timeout=timedelta(seconds=TIMEOUT_SECONDS))
    # In one write: mpiexec mixes what its ranks write.
    os.write(1, (json.dumps(report(options.backends)) + "\n").encode())
    if options.fault:
        globals()[options.fault]()
    dist.destroy_process_group()
    if "gloo" in options.backends:
        os._exit(0)  # A thread of gloo sometimes aborts a process that exits: see tests/launch/hosts/train_job.py.


main()
