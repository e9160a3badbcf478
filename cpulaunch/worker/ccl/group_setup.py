"""Set-up of a group: the path that its collectives take, on which all ranks agree.

oneCCL's transport names its memory in /dev/shm "PID:…" and unlinks it at a normal exit; after kill -9 the files
would remain. Once all ranks of the program have mapped each other's memory the names are not needed, so they are
unlinked early. A later rank could not find them, so this is done only for a group of all ranks, and the communicator of
that group is kept until the process exits: without it, oneCCL would start again for later groups, with no names.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import distributed as dist

from cpulaunch.records.ccl_defaults import PATH_VARIABLE
from cpulaunch.system.files.shared_memory import remove_own_shared_memory
from cpulaunch.worker.ccl.collective_ops import CollectiveOps
from cpulaunch.worker.ccl.delegate import FAILURE_KEY, mention
from cpulaunch.worker.ccl.memory.path import MemoryPath
from cpulaunch.worker.ccl.memory.setup import ELSEWHERE, join_memory
from cpulaunch.worker.ccl.oneccl import api
from cpulaunch.worker.ccl.oneccl.library import folder
from cpulaunch.worker.ccl.oneccl.network import check_hosts, own_address, this_host
from cpulaunch.worker.ccl.oneccl.path import OnecclPath
from cpulaunch.worker.ccl.oneccl.peers import PeerConnections
from cpulaunch.worker.ccl.wire.agreement import Agreement
from cpulaunch.worker.ccl.wire.errors import CclError, UnavailableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta
    from typing import Any

    from cpulaunch.worker.ccl.works.executor import GroupQueue

PATHS = ("auto", "memory", "oneccl")
SHARED_FOLDER = "/dev/shm"
TELLING_SECONDS = 1.0
"""How long a rank that fails may take to tell the others: calls of one store wait for each other."""
SHARED_BYTES = 26 << 20
"""Shared memory of oneCCL 2022.1's transport per rank, in bytes; with less it fails with a bus error."""

_kept: list[CollectiveOps] = []


@contextmanager
def shared_fate(store: Any, rank: int) -> Iterator[Any]:
    """The store, for the keys of this group alone: those of one of the same name that was destroyed may be there still.

    torch names the first group of a program alike each time, and a launcher's store outlives it. Every rank joins as
    often as the others. Effect: if the set-up fails in this rank, the others learn it from the store.
    """
    fresh = dist.PrefixStore(f"time {store.add(f'times/{rank}', 1)}", store)
    try:
        yield fresh
    except BaseException as error:
        telling = threading.Thread(target=_tell, args=(fresh, f"rank {rank}: {error}"), daemon=True)
        telling.start()
        telling.join(TELLING_SECONDS)  # Not longer: the thread of oneCCL may wait for a lost rank's key in this store.
        raise


def _tell(store: Any, failure: str) -> None:
    with suppress(RuntimeError):  # The store's server has gone.
        store.set(FAILURE_KEY, failure)


def requested_path() -> str:
    """The path that the environment requests. Raises: CclError if there is no such path."""
    path = os.environ.get(PATH_VARIABLE) or "auto"
    if path not in PATHS:
        raise CclError(f"{PATH_VARIABLE} is {path}: it must be one of {', '.join(PATHS)}")
    return path


def join_memory_path(store: Any, requested: str, *, rank: int, size: int, timeout: timedelta) -> MemoryPath | str:
    """The memory path, or the reason, the same in all ranks, why there is none.

    Raises: CclError if the memory path is requested but not available; PeerLostError.
    """
    if requested == "oneccl":
        return "oneCCL is requested"
    try:
        return MemoryPath(join_memory(store, rank=rank, size=size, seconds=timeout.total_seconds()))
    except UnavailableError as error:
        if requested == "memory":
            hint = f"hint: set {PATH_VARIABLE}=auto"
            raise CclError(f"{PATH_VARIABLE} is memory, but {error}\n{hint}") from None
        return str(error)


def join_oneccl_or_not(
    join: Callable[[], CollectiveOps], why_not_memory: str, requested: str, *, rank: int
) -> CollectiveOps | None:
    """What `join` returns, which is join_oneccl; None in all ranks, and one line on stderr, if the group uses gloo.

    Raises: as `join`.
    """
    reasons = [why_not_memory]
    if requested == "oneccl" or why_not_memory == ELSEWHERE:
        try:
            return join()
        except UnavailableError as error:
            if requested == "oneccl":
                raise
            reasons.append(str(error).splitlines()[0])
    if rank == 0:
        mention(f"ccl uses gloo: {'; '.join(reasons)}")
    return None


def join_oneccl(
    store: Any, rank: int, size: int, seconds: float, *, on_connect: Callable[[PeerConnections], None]
) -> CollectiveOps:
    """The collectives of this rank over oneCCL, once all ranks have joined.

    `on_connect` receives the object that detects and reports lost ranks, before oneCCL is loaded and connects, which
    would wait forever for a rank that exits. Raises: UnavailableError, in all ranks, if one cannot join; CclError.
    """
    peers, agree = PeerConnections(rank), Agreement(store, rank, size, time.monotonic() + seconds).on

    def introduced() -> str:
        folder()
        check_space(size)
        return f"{peers.bind(own_address(os.environ))} {this_host()}"

    try:
        members = [each.split(" ", 3) for each in agree("hosts", introduced)]
        check_hosts([host for *_, host in members])
        peers.connect([(address, int(port), int(process)) for address, port, process, _ in members], seconds)
    except BaseException:
        peers.close()
        raise
    on_connect(peers)  # Who has them closes them from here on, once it has asked them which rank is lost.
    agree("loaded", api.version)  # Before there is an identity, for which oneCCL listens until the process ends.
    identity, *_ = agree("identity", lambda: "" if rank else api.unique_id().hex())
    communicator = api.Communicator(bytes.fromhex(identity), rank=rank, size=size)
    ops = CollectiveOps(OnecclPath(communicator, peers, size=size), rank=rank, size=size)
    if spans_program(size):
        _unlink_shared_memory(ops, size)
    return ops


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
    ops.all_to_all(torch.empty_like(source), source, [[1] * size] * 2)
    ops.barrier()
    remove_own_shared_memory()
    if not _kept:
        _kept.append(ops)


def leave(ops: CollectiveOps) -> None:
    """Effect: this rank leaves the group, and frees its resources unless they are kept. Raises: CclError."""
    ops.path.leave()
    if ops not in _kept:
        ops.path.close()


def leave_dropped(queue: GroupQueue, ops: CollectiveOps | None) -> None:
    """Effect: this rank leaves a group in memory that was dropped: torch before 2.6 destroys groups in this way."""
    if ops is not None and not queue.executor.may_hang:
        with suppress(RuntimeError):  # The group is broken, or this is another process.
            queue.submit(partial(leave, ops), seconds=0.0)
        queue.executor.close()
