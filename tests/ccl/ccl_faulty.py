"""A rank whose group meets a fault: `ccl_faulty.py FAULT`. Prints what rank 0 sees of it."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import cpulaunch.ccl  # noqa: F401 - registers the backend

LARGE = 1 << 22
LATE_SECONDS, TIMEOUT_SECONDS = 6, 3


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def collective(times=1):
    tensor = torch.ones(LARGE)
    for _ in range(times):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)


def dies_before(rank):
    if rank == 1:
        kill_self()
    collective()


def dies_within(rank):
    if rank == 1:
        threading.Timer(0.3, kill_self).start()
    collective(times=100_000)


def all_die(rank):
    collective()
    kill_self()


def leaves(rank):
    if rank == 1:
        sys.exit(0)
    collective()


def late(rank):
    if rank == 1:
        # The fault itself: longer than the others wait.
        time.sleep(LATE_SECONDS)
    collective()


def interrupted(rank):
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        collective(times=100_000)
    else:
        collective()
        signal.pause()


def forked(rank):
    collective()
    if rank == 0:
        child = os.fork()
        if child == 0:
            try:
                collective()
            except RuntimeError as error:
                print(f"child: {error}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    collective()
    print("fine", flush=True)


def fine(rank):
    collective()
    print("fine", flush=True)


def main(fault):
    torch.set_num_threads(1)
    seconds = TIMEOUT_SECONDS if fault == "late" else 60
    dist.init_process_group("ccl", timeout=timedelta(seconds=seconds))
    try:
        globals()[fault](dist.get_rank())
    except (RuntimeError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise
    dist.destroy_process_group()


main(sys.argv[1])
