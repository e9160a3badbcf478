"""Set-up of a group's shared memory, by ranks that verify each other.

Anyone who reaches the ranks' store may write to it, so nothing that it holds is believed. Rank 0 makes the memory, a
memfd, which has no name that others could open, and tells the number of its descriptor. The others open it in /proc,
which the kernel permits to processes of the same user; they take only a memfd of this user's with the seals and the
size of a group's. A rank then looks at the descriptor that every other process has told, which is the same memfd: this
proves that the process id belongs to a member. The process descriptors (pidfd), opened before that and alive after it,
prove that no id was reused; where there are none (-1), its lost ranks are noticed later. Sources: memfd_create(2);
proc_pid_fd(5); pidfd_open(2).
"""

import fcntl
import mmap
import os
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from cpulaunch.system.files.owners import is_ambiguous, is_unmapped
from cpulaunch.worker.ccl.memory.library import bytes_needed, load
from cpulaunch.worker.ccl.memory.path import MemoryPath, close_all, first_exited
from cpulaunch.worker.ccl.wire.agreement import Agreement
from cpulaunch.worker.ccl.wire.errors import UnavailableError

KEY = "memory"
"""Prefix of the keys in the store."""
ELSEWHERE = "ranks are on several hosts"
FORBIDDEN = "the kernel does not permit ranks to access each other's memory"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_EXEC = 0x20
"""Added by the kernel where the sysctl vm.memfd_noexec is 1 or 2. Source: linux/fcntl.h."""


def join_memory(store: Any, *, rank: int, size: int, seconds: float) -> MemoryPath:
    """This rank's view of the group's shared memory, once all ranks have joined.

    Raises: UnavailableError, in all ranks and with the same reason, if one of them cannot join; PeerLostError if one
    exits, or does not join within `seconds`.
    """
    pidfds: list[int] = []
    mapped: list[mmap.mmap] = []
    agree = Agreement(store, rank, size, time.monotonic() + seconds, exited=lambda: first_exited(pidfds)).on
    with ExitStack() as resources, ExitStack() as after_failure:
        rows = [each.split() for each in agree(f"{KEY}/hosts", partial(_introduced, rank, size, resources))]
        if len({host for host, _, _ in rows}) > 1:
            raise UnavailableError(ELSEWHERE)
        processes, first = [int(process) for _, process, _ in rows], int(rows[0][2])
        after_failure.callback(close_all, pidfds)
        pidfds += [-1 if other == rank else _open_pidfd(process) for other, process in enumerate(processes)]
        opened = agree(f"{KEY}/opened", lambda: str(_opened(processes[0], first, size, resources)))
        descriptors = [int(each) for each in opened]
        agree(f"{KEY}/verified", lambda: _verified(processes, descriptors, rank, pidfds, mapped))
        group = MemoryPath(*mapped, rank=rank, processes=processes, pidfds=pidfds, seconds=seconds)
        after_failure.pop_all()
        return group


def _introduced(rank: int, size: int, resources: ExitStack) -> str:
    """This host, this process's id, and, of rank 0, the descriptor of the memory, which it makes. Raises: OSError.

    Ranks in several network namespaces, such as those of containers, are on several hosts. Source: random(4), boot_id.
    """
    user = os.geteuid()
    if is_unmapped(user) or is_ambiguous(user):
        raise OSError("users without a number in this user namespace look like this one")
    if load() is None:
        raise OSError("cpulaunch was installed without a C compiler")
    descriptor = -1
    if rank == 0:
        descriptor = os.memfd_create("cpulaunch-ccl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        resources.callback(os.close, descriptor)
        os.ftruncate(descriptor, bytes_needed(size))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino} {os.getpid()} {descriptor}"


def _opened(process: int, descriptor: int, size: int, resources: ExitStack) -> int:
    """A descriptor of the memory, which is open in rank 0's process. Raises: OSError, UnavailableError.

    What another user put there is looked at before it is opened, since to open a device may have an effect.
    """
    try:
        place = os.open(f"/proc/{process}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        raise UnavailableError(FORBIDDEN) from None
    resources.callback(os.close, place)
    status = os.fstat(place)
    if (stat.S_ISREG(status.st_mode), status.st_uid, status.st_size) != (True, os.geteuid(), bytes_needed(size)):
        raise UnavailableError(FORBIDDEN)
    opened = os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_CLOEXEC)
    resources.callback(os.close, opened)
    if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & ~_SEAL_EXEC != _SEALS:
        raise UnavailableError(FORBIDDEN)
    return opened


def _verified(
    processes: Sequence[int], descriptors: Sequence[int], rank: int, pidfds: Sequence[int], mapped: list[mmap.mmap]
) -> str:
    """Effect: adds the memory to `mapped`. Raises: OSError, UnavailableError unless every process has it and runs."""
    mine = os.fstat(descriptors[rank])
    for process, descriptor in zip(processes, descriptors, strict=True):
        try:
            theirs = os.stat(f"/proc/{process}/fd/{descriptor}")
        except (FileNotFoundError, PermissionError):
            raise UnavailableError(FORBIDDEN) from None
        if not os.path.samestat(mine, theirs):
            raise UnavailableError(FORBIDDEN)
    lost = first_exited(pidfds)
    if lost is not None:
        raise OSError(f"rank {lost} has exited")
    mapped.append(mmap.mmap(descriptors[rank], bytes_needed(len(processes))))
    return ""


def _open_pidfd(process: int) -> int:
    """A descriptor of the process; -1 on Linux before 5.3, or where a filter forbids it."""
    with suppress(OSError):
        return os.pidfd_open(process)
    return -1
