"""Set-up of a group: its barrier, and the path that its collectives take.

oneCCL's transport names its memory in /dev/shm "PID:…" and unlinks it at a normal exit; after kill -9 the files
would remain. Once all ranks of the program have mapped each other's memory the names are not needed, so they are
unlinked early. A later rank could not find them, so this is done only for a group of all ranks, and the communicator of
that group is kept until the process exits: without it, oneCCL would start again for later groups, with no names.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

import torch
from torch import distributed as dist

from cpulaunch.records.ccl_defaults import PATH_VARIABLE
from cpulaunch.worker.ccl.collective_ops import CollectiveOps
from cpulaunch.worker.ccl.memory.native import open_native_barrier, open_path
from cpulaunch.worker.ccl.memory.path import can_access_all
from cpulaunch.worker.ccl.oneccl import api
from cpulaunch.worker.ccl.oneccl.call_check import CallCheck
from cpulaunch.worker.ccl.oneccl.library import TRANSPORT
from cpulaunch.worker.ccl.oneccl.network import check_host_names, own_address
from cpulaunch.worker.ccl.oneccl.path import OnecclPath
from cpulaunch.worker.ccl.oneccl.peer_connections import PeerConnections, open_connections
from cpulaunch.worker.ccl.wire.codes import CALL
from cpulaunch.worker.ccl.wire.errors import CclError
from cpulaunch.worker.ccl.wire.reductions import describe_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from typing import Any

    from cpulaunch.worker.ccl.memory.shared_barrier import SharedBarrier

    Watched = SharedBarrier | PeerConnections

PATHS = ("auto", "memory", "oneccl")
SHARED_FOLDER = "/dev/shm"
SHARED_BYTES = 26 << 20
"""Shared memory of oneCCL 2022.1's transport per rank, in bytes; with less it fails with a bus error."""

_kept: list[CollectiveOps] = []
_NO_CALL = bytes(CALL.size)


def check_machine(system: str, architecture: str) -> None:
    """Raises: CclError unless this is x86-64 Linux, which oneCCL and the shared barrier need."""
    if (system, architecture) != ("linux", "x86_64"):
        raise CclError(f"the ccl backend supports x86-64 Linux only, not {architecture} {system}\nhint: use gloo")


def requested_path() -> str:
    """The path that the environment requests. Raises: CclError if there is no such path."""
    path = os.environ.get(PATH_VARIABLE) or "auto"
    if path not in PATHS:
        raise CclError(f"{PATH_VARIABLE} is {path}: it must be one of {', '.join(PATHS)}")
    return path


def with_fresh_keys(store: Any, rank: int) -> Any:
    """The store, for the keys of this group alone: those of one of the same name that was destroyed may be there still.

    torch names the first group of a program alike each time, and a launcher's store outlives it. Every rank joins as
    often as the others.
    """
    return dist.PrefixStore(f"time {store.add(f'times/{rank}', 1)}", store)


def open_barrier(memory: mmap.mmap | None, *, rank: int, size: int, seconds: float) -> SharedBarrier | None:
    """The group's barrier; None if the ranks are on several hosts. Raises: PeerLostError."""
    if memory is None:
        return None
    barrier = open_native_barrier(memory, rank=rank, size=size, describe=describe_call)
    barrier.synchronize(_NO_CALL, seconds)
    if len(barrier.cpus()) < size:
        barrier.disable_spinning()
    return barrier


def agree_on_memory(barrier: SharedBarrier | None, requested: str, seconds: float) -> bool:
    """Whether all ranks may use the memory path. Raises: CclError if it is requested but one may not."""
    permitted = barrier is not None and can_access_all(barrier, seconds, call=_NO_CALL)
    agreed = permitted and requested != "oneccl"
    if barrier is not None:
        barrier.synchronize(_NO_CALL, seconds, values=(int(agreed), 0))
        agreed = agreed and all(barrier.values(other)[0] for other in barrier.others)
    if requested == "memory" and not agreed:
        why = (
            "the kernel does not permit ranks to access each other's memory"
            if barrier
            else "ranks are on several hosts"
        )
        raise CclError(f"{PATH_VARIABLE} is memory, but {why}\nhint: set {PATH_VARIABLE}=auto")
    return agreed


def join_oneccl(
    store: Any,
    barrier: SharedBarrier | None,
    *,
    rank: int,
    size: int,
    seconds: float,
    on_connect: Callable[[Watched], None],
) -> CollectiveOps:
    """The collectives of this rank over oneCCL, once all ranks have joined.

    `on_connect` receives the object that detects and reports lost ranks, before oneCCL connects. Raises: CclError.
    """
    check_space(size)
    watched: Watched = barrier if barrier is not None else _between_hosts(store, rank=rank, size=size, seconds=seconds)
    on_connect(watched)
    if rank == 0:
        store.set("ccl/id", api.unique_id())
    communicator = api.Communicator(store.get("ccl/id"), rank=rank, size=size)
    place = (
        CallCheck(communicator, watched, size=size, describe=describe_call)
        if isinstance(watched, PeerConnections)
        else watched
    )
    ops = CollectiveOps(OnecclPath(communicator, place, size=size, seconds=seconds), place, size=size)
    if os.environ.get(TRANSPORT) == "mpi":  # An exiting rank waits in MPI_Finalize; the others must not wait for it.
        atexit.register(ops.give_up)
    if spans_program(size):
        _unlink_shared_memory(ops, size)
    return ops


def _between_hosts(store: Any, *, rank: int, size: int, seconds: float) -> PeerConnections:
    """Connections to ranks on other hosts, made before oneCCL's, which would wait forever for a rank that exits."""
    check_host_names(store, rank=rank, size=size)
    address = own_address(os.environ) if rank == 0 else ""
    return open_connections(store, address, rank=rank, size=size, seconds=seconds)


def join_memory(barrier: SharedBarrier, seconds: float) -> CollectiveOps:
    """The collectives of this rank over the memory path."""
    return CollectiveOps(open_path(barrier, seconds), barrier, size=barrier.size)


def check_space(size: int) -> None:
    """Raises: CclError if /dev/shm is too small for the ranks of this host."""
    if _kept:
        return
    local_ranks = min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    try:
        status = os.statvfs(SHARED_FOLDER)
    except OSError:
        return
    free, needed = status.f_bavail * status.f_frsize, SHARED_BYTES * local_ranks
    if free < needed:
        raise CclError(
            f"{SHARED_FOLDER} is too small for oneCCL: {free >> 20} MiB free, {needed >> 20} MiB needed by "
            f"{local_ranks} ranks\nhint: enlarge it (docker run --shm-size {2 * needed >> 20}m), or use gloo"
        )


def spans_program(size: int) -> bool:
    """Whether a group of this size contains all ranks of the program."""
    return not dist.is_initialized() or size == dist.get_world_size()


def _unlink_shared_memory(ops: CollectiveOps, size: int) -> None:
    """Effect: unlinks this rank's files in /dev/shm, after all ranks have mapped each other's."""
    source = torch.zeros(size, dtype=torch.int32, device="cpu")
    ops.all_to_all(torch.empty_like(source), source)
    ops.barrier()
    mark = f"{os.getpid()}:"
    for name in os.listdir(SHARED_FOLDER):
        if name.startswith(mark):
            with suppress(OSError):
                os.unlink(os.path.join(SHARED_FOLDER, name))
    if not _kept:
        _kept.append(ops)


def leave(ops: CollectiveOps) -> None:
    """Effect: this rank leaves the group. Raises: CclError."""
    atexit.unregister(ops.give_up)
    if ops not in _kept:
        ops.close()
