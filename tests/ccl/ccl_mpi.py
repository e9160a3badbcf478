"""A rank that mpiexec started: `ccl_mpi.py BACKEND [FAULT]`. Prints its losses, and how the data moved."""

import ctypes
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

TIMEOUT_SECONDS = 30


def losses():
    """The losses of this rank, step by step."""
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    found = []
    for _ in range(5):
        inputs = torch.randn(32, 64)
        loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), inputs.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def joined_by_mpi():
    """Whether this process has started MPI."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libmpi.so" in line}
    flag = ctypes.c_int()
    for path in paths:
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD).MPI_Initialized(ctypes.byref(flag))
    return bool(flag)


def raises():
    if dist.get_rank() == 1:
        raise ValueError("this rank's own mistake")
    dist.all_reduce(torch.ones(4))


def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def stays():
    """Rank 0 ends without a word to the group, while rank 1 still has to hear from the test."""
    if dist.get_rank() == 0:
        sys.exit(0)
    print("alone", flush=True)
    Path(os.environ["CPULAUNCH_TEST_GATE"]).read_text()
    print("done", flush=True)
    sys.exit(0)


def main(backend, fault=None):
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    report = {"rank": dist.get_rank(), "losses": losses(), "mpi": joined_by_mpi()}
    # In one write: mpiexec mixes what its ranks write.
    os.write(1, (json.dumps(report) + "\n").encode())
    if fault is not None:
        globals()[fault]()
    dist.destroy_process_group()
    if backend == "gloo":
        os._exit(0)  # A thread of gloo's aborts a process that ends now and then: see tests/hosts/train_job.py.


main(*sys.argv[1:])
