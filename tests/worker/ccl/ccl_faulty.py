"""A rank whose group meets a fault: `ccl_faulty.py FAULT`. Prints what rank 0 sees of it."""

import os
import signal
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from ccl_filter import forbid_reading_others

import cpulaunch.ccl  # noqa: F401 - registers the backend

LARGE = 1 << 22
TIMEOUT_SECONDS, PATIENCE_SECONDS = 8, 60
"""Of a group whose ranks have all started before it is made, and of others."""


@cache
def store():
    """What ranks meet by that have nothing else left."""
    return dist.TCPStore("127.0.0.1", int(os.environ["MEETING_PORT"]), is_master=os.environ["RANK"] == "0")


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


def die_when_it_opens_oneccl(event, arguments):
    if event == "ctypes.dlopen" and "libccl" in str(arguments[0]):
        kill_self()


def dies_joining(rank):
    """Nobody comes so far."""


def dies_in_backward(rank):
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(2)])
    network = torch.nn.parallel.DistributedDataParallel(model)
    network(torch.ones(1, 2048)).sum().backward()
    if rank == 1:
        threading.Timer(0.2, kill_self).start()
    while True:
        network(torch.ones(1, 2048)).sum().backward()


def all_die(rank):
    collective()
    kill_self()


def leaves(rank):
    if rank == 1:
        sys.exit(0)
    collective()


def aborted(rank):
    """Rank 1 gives the group up, and lives on until rank 0 has seen it."""
    place = store()
    if rank == 1:
        collective()
        dist.group.WORLD.abort()
        place.wait(["seen"])
        return
    collective()
    try:
        collective()
    finally:
        place.set("seen", "1")


def again(rank):
    """Groups of one name, one after another, over a store that stays, as an elastic launcher's does."""
    dist.destroy_process_group()
    place, timeout = store(), timedelta(seconds=PATIENCE_SECONDS)
    for _ in range(3):
        dist.init_process_group("ccl", store=place, rank=rank, world_size=2, timeout=timeout)
        collective()
        dist.destroy_process_group()
    dist.init_process_group("ccl", store=place, rank=rank, world_size=2)
    print("fine", flush=True)


def late(rank):
    """Rank 1 does not come until rank 0 has given up."""
    if rank == 1:
        with suppress(RuntimeError):  # With rank 0 its store ends.
            store().wait(["seen"])
        return
    try:
        collective()
    finally:
        store().set("seen", "1")


def impatient(rank):
    """Rank 1 does not come in the time that rank 0 has for this one call."""
    if rank == 1:
        with suppress(RuntimeError):
            store().wait(["seen"])
        return
    options = dist.BarrierOptions()
    options.timeout, options.asyncOp = timedelta(seconds=1), False
    try:
        dist.group.WORLD.barrier(options).wait()
    finally:
        store().set("seen", "1")


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


def gives_up(rank):
    """Rank 0 is interrupted where it waits for rank 1, goes on, and rank 1 comes to the call afterwards."""
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with suppress(KeyboardInterrupt):
            collective()
        store().wait(["done"])
        print("went on", flush=True)
        return
    place = store()
    try:
        collective()
    finally:
        place.set("done", "1")


def forbidden(rank):
    collective()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        print("over oneCCL" if "libccl" in maps.read() else "in memory", flush=True)


permitted = forbidden


def main(fault):
    torch.set_num_threads(1)
    if fault == "forbidden" and os.environ["RANK"] == "1":
        forbid_reading_others()
    if fault == "dies_joining" and os.environ["RANK"] == "1":
        sys.addaudithook(die_when_it_opens_oneccl)
    if fault in ("late", "impatient"):
        store().set(f"started/{os.environ['RANK']}", "1")
        store().wait(["started/0", "started/1"])
    seconds = TIMEOUT_SECONDS if fault == "late" else PATIENCE_SECONDS
    dist.init_process_group("ccl", timeout=timedelta(seconds=seconds))
    try:
        globals()[fault](dist.get_rank())
    except (RuntimeError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise
    dist.destroy_process_group()


main(sys.argv[1])
