"""Set-up of a group: the path that its collectives take, on which all ranks agree, and gloo's group of the same ranks.

oneCCL's transport names its memory in /dev/shm "PID:…" and unlinks it at a normal exit; after kill -9 the files
would remain. Once all ranks of the program have mapped each other's memory the names are not needed, so they are
unlinked early. A later rank could not find them, so this is done only for a group of all ranks, and the communicator of
that group is kept until the process exits: without it, oneCCL would start again for later groups, with no names.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch import distributed as dist

from cpulaunch.records.ccl_defaults import PATH_VARIABLE
from cpulaunch.records.torch_settings import VARIABLE, TorchSettings, decode
from cpulaunch.system.files.shared_memory import SHARED_FOLDER, remove_own_shared_memory
from cpulaunch.worker.ccl.memory.path import MemoryPath
from cpulaunch.worker.ccl.memory.setup import ELSEWHERE, join_memory
from cpulaunch.worker.ccl.oneccl import library
from cpulaunch.worker.ccl.oneccl.network import check_hosts, own_address, this_host
from cpulaunch.worker.ccl.oneccl.path import OnecclPath
from cpulaunch.worker.ccl.oneccl.peers import PeerConnections
from cpulaunch.worker.ccl.wire.agreement import FAILURE_KEY, MAX_PAUSE_SECONDS, Agreement, check_failure
from cpulaunch.worker.ccl.wire.errors import CclError, UnavailableError
from cpulaunch.worker.ccl.works.executor import GroupQueue
from cpulaunch.worker.ccl.works.thread_setup import start_thread
from cpulaunch.worker.reporting.degradation import warned

PATHS = ("auto", "memory", "oneccl")
TELLING_SECONDS = 0.7
"""How long a rank that fails may take to tell the others: calls of one store wait for each other."""
POLL_SECONDS = 0.1
"""Interval at which a rank checks whether the set-up of another one has failed."""
SHARED_BYTES = 26 << 20
"""Shared memory of oneCCL 2022.1's transport per rank, in bytes; with less it fails with a bus error."""

_kept: list[OnecclPath] = []


@cache
def mention(text: str) -> None:
    """Effect: warns once in a process."""
    settings = os.environ.get(VARIABLE)
    warned(decode(settings) if settings else TorchSettings(), text)


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
        # Not longer: oneCCL's thread may wait for a lost rank's key in this store.
        start_thread("ccl set-up", partial(_tell, fresh, f"rank {rank}: {error}")).join(TELLING_SECONDS)
        time.sleep(2 * MAX_PAUSE_SECONDS)  # This rank's threads see it and end; one in the store would abort an exit.
        raise


def _tell(store: Any, failure: str) -> None:
    with suppress(RuntimeError):  # The store's server has gone.
        store.compare_set(FAILURE_KEY, "", failure)


def open_gloo(store: Any, rank: int, size: int, timeout: timedelta, memory: MemoryPath | str = "") -> Any:
    """A group over gloo, once all ranks have created it. Raises: CclError as soon as the set-up of a rank fails.

    A thread that waits for a lost rank in gloo itself cannot be ended, and one that wakes while the interpreter shuts
    down ends the process with SIGABRT (pytorch issue 38228): so ranks begin together.
    """
    exited = memory.exited if isinstance(memory, MemoryPath) else lambda: None
    Agreement(store, rank, size, time.monotonic() + timeout.total_seconds(), exited).on("gloo begins")
    made: futures.Future[Any] = futures.Future()

    def make() -> None:
        try:
            backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
            _wait_for_all(store, rank, size, timeout, exited)
            made.set_result(backend)
        except Exception as error:  # noqa: BLE001 - raised by the calling thread
            made.set_exception(error)

    watched = _copy_of(store)
    start_thread("gloo set-up", make)
    while not futures.wait([made], POLL_SECONDS).done:
        if watched is not None:
            check_failure(watched)
    kind: Any = dist.ProcessGroup
    if hasattr(kind, "Options"):  # torch before 2.6.
        group = kind(store, rank, size, kind.Options("gloo"))
    else:
        group = kind(store, rank, size)
        group._set_default_backend(kind.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), kind.BackendType.GLOO, made.result())
    return group


def _wait_for_all(store: Any, rank: int, size: int, timeout: timedelta, exited: Callable[[], int | None]) -> None:
    """Effect: returns once all ranks have connected: one that destroys its group closes connections of slower ones.

    Rank 0 usually runs the store's server, and may exit at once: it returns once the others need the store no more.
    """
    Agreement(store, rank, size, time.monotonic() + timeout.total_seconds(), exited).on("gloo made")
    if rank:
        store.set(f"gloo seen/{rank}", "")
    elif size > 1:
        store.wait([f"gloo seen/{other}" for other in range(1, size)], timeout)


def _copy_of(store: Any) -> Any:
    """Another connection to the store, as calls of one wait for each other; None if the store or torch has none."""
    with suppress(AttributeError, RuntimeError):
        return store.clone()
    return None


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
        return join_memory(store, rank=rank, size=size, seconds=timeout.total_seconds())
    except UnavailableError as error:
        if requested == "memory":
            hint = f"hint: set {PATH_VARIABLE}=auto"
            raise CclError(f"{PATH_VARIABLE} is memory, but {error}\n{hint}") from None
        return str(error)


def join_oneccl_or_not(
    join: Callable[[], OnecclPath], why_not_memory: str, requested: str, *, rank: int
) -> OnecclPath | None:
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
) -> OnecclPath:
    """The collectives of this rank over oneCCL, once all ranks have joined.

    `on_connect` receives the object that detects and reports lost ranks, before oneCCL is loaded and connects, which
    would wait forever for a rank that exits. Raises: UnavailableError, in all ranks, if one cannot join; CclError.
    """
    peers, agree = PeerConnections(rank), Agreement(store, rank, size, time.monotonic() + seconds).on

    def introduced() -> str:
        library.folder()
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
    agree("loaded", library.version)  # Before there is an identity, for which oneCCL listens until the process ends.
    identity, *_ = agree("identity", lambda: "" if rank else library.unique_id().hex())
    communicator = library.Communicator(bytes.fromhex(identity), rank=rank, size=size)
    ops = OnecclPath(communicator, peers, size=size)
    if not dist.is_initialized() or size == dist.get_world_size():  # The group has all ranks of the program.
        source = torch.zeros(size, dtype=torch.int32, device="cpu")
        ops.run("all_to_all", torch.empty_like(source), source, splits=[[1] * size] * 2)
        ops.barrier()  # All ranks have mapped each other's files in /dev/shm.
        remove_own_shared_memory()
        _kept[:] = _kept or [ops]
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


def leave(ops: MemoryPath | OnecclPath) -> None:
    """Effect: this rank leaves the group, and frees its resources unless they are kept. Raises: CclError."""
    ops.leave()
    if ops not in _kept:
        ops.close()


def leave_dropped(queue: GroupQueue, ops: MemoryPath | OnecclPath | None) -> None:
    """Effect: this rank leaves a group in memory that was dropped: torch before 2.6 destroys groups in this way."""
    if ops is not None and not queue.executor.may_hang:
        with suppress(RuntimeError):  # The group is broken, or this is another process.
            queue.submit(partial(leave, ops), seconds=0.0)
        queue.executor.close()
