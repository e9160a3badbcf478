"""A rank of a group with a fault: `ccl_faulty.py FAULT`. Prints the error that the rank gets, if it gets one."""

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from ccl_filter import forbid_reading_others

if sys.argv[1] == "calls_at_exit":
    atexit.register(lambda: call_at_exit())

import cpulaunch.ccl  # noqa: F401 - registers the backend

LARGE = 1 << 22
SHORT_TIMEOUT_SECONDS, TIMEOUT_SECONDS = 1, 60
"""Timeouts of groups: in the fault "late" once the group is set up, and else."""


@cache
def store():
    """A store of the test, by which ranks synchronize even if their group is broken."""
    return dist.TCPStore("127.0.0.1", int(os.environ["TEST_STORE_PORT"]), is_master=os.environ["RANK"] == "0")


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


def die_on_oneccl_load(event, arguments):
    if event == "ctypes.dlopen" and "libccl" in str(arguments[0]):
        kill_self()


def refuse_oneccl(event, arguments):
    if event == "ctypes.dlopen" and "libccl" in str(arguments[0]):
        raise OSError("libccl of this test is missing")


def cannot_load(rank):
    """Not reached: rank 1 cannot load oneCCL."""


def dies_during_setup(rank):
    """Not reached: rank 1 dies while the group is created."""


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


def ends_with_a_pending_call(rank):
    """Rank 0 ends, without destroying its group, before rank 1 takes part in its broadcast."""
    tensor = torch.full((LARGE,), float(rank))
    if rank == 0:
        dist.broadcast(tensor, 0, async_op=True)
        sys.exit(0)
    time.sleep(1)
    dist.broadcast(tensor, 0)
    print(tensor.sum().item(), flush=True)
    sys.exit(0)


def calls_at_exit(rank):
    """A handler of atexit, registered before the backend, waits for a future."""
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    sys.exit(0)


def call_at_exit():
    tensor = torch.ones(4)
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    print(tensor.sum().item(), flush=True)
    dist.destroy_process_group()


def destroyed(rank):
    """Rank 0 destroys the group while a collective is pending that rank 1 does not call in time."""
    shared_store = store()
    if rank == 1:
        shared_store.wait(["destroyed"])
        try:
            collective()
        finally:
            shared_store.set("seen", "1")
        return
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_TIMEOUT_SECONDS))
    dist.all_reduce(torch.ones(LARGE), dist.ReduceOp.MAX, async_op=True)
    dist.destroy_process_group()
    print(f"destroyed: {not dist.is_initialized()}", flush=True)
    shared_store.set("destroyed", "1")
    shared_store.wait(["seen"])
    os._exit(0)  # There is no group any more.


def aborted(rank):
    """Rank 1 aborts the group and stays alive until rank 0 has noticed."""
    shared_store = store()
    if rank == 1:
        collective()
        dist.group.WORLD.abort()
        shared_store.wait(["seen"])
        return
    collective()
    try:
        collective()
    finally:
        shared_store.set("seen", "1")


def recreated(rank):
    """Creates groups of the same name in turn over one store, which stays, as that of an elastic launcher."""
    dist.destroy_process_group()
    shared_store, timeout = store(), timedelta(seconds=TIMEOUT_SECONDS)
    for _ in range(3):
        dist.init_process_group("ccl", store=shared_store, rank=rank, world_size=2, timeout=timeout)
        collective()
        dist.destroy_process_group()
    dist.init_process_group("ccl", store=shared_store, rank=rank, world_size=2)
    print("fine", flush=True)


def late(rank):
    """Rank 1 does not call the collective until that of rank 0 has timed out."""
    if rank == 1:
        with suppress(RuntimeError):  # The store ends with rank 0.
            store().wait(["seen"])
        return
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_TIMEOUT_SECONDS))
    try:
        collective()
    finally:
        store().set("seen", "1")


def own_timeout(rank):
    """Rank 1 does not call the barrier within the timeout that rank 0 sets for this call."""
    if rank == 1:
        with suppress(RuntimeError):
            store().wait(["seen"])
        return
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=1)
    if hasattr(options, "asyncOp"):  # torch 2.5 does not tell the group whether the caller waits.
        options.asyncOp = False
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


def interrupted_and_continues(rank):
    """Rank 0 is interrupted while it waits for rank 1 and continues; rank 1 calls the collective afterwards."""
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with suppress(KeyboardInterrupt):
            collective()
        store().wait(["done"])
        print("went on", flush=True)
        return
    shared_store = store()
    try:
        collective()
    finally:
        shared_store.set("done", "1")


def forbidden(rank):
    collective()
    words = {"memory": "in memory", "oneccl": "over oneCCL", "gloo": "over gloo"}
    print(words[dist.group.WORLD.path], flush=True)


permitted = forbidden


def main(fault):
    torch.set_num_threads(1)
    if fault == "forbidden" and os.environ["RANK"] == "1":
        forbid_reading_others()
    if fault == "dies_during_setup" and os.environ["RANK"] == "1":
        sys.addaudithook(die_on_oneccl_load)
    if fault == "cannot_load" and os.environ["RANK"] == "1":
        sys.addaudithook(refuse_oneccl)
    if fault in ("late", "own_timeout"):
        store().set(f"started/{os.environ['RANK']}", "1")
        store().wait(["started/0", "started/1"])
    dist.init_process_group("ccl", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    try:
        globals()[fault](dist.get_rank())
    except (RuntimeError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise
    dist.destroy_process_group()


main(sys.argv[1])
