"""Set-up of a group's shared memory, by ranks that verify each other.

Anyone who reaches the ranks' store may write to it, so nothing that it holds is believed. Rank 0 listens on a Unix
socket, whose name is in the store; the kernel tells both ends of a connection the other's user, which must be the same.
Over the connections the ranks get each other's process ids and the memory, a memfd, which has no name that others could
open. A rank then reads a random number, told over the connections, from the memory of every process: this proves
that the id belongs to a member, also in another pid namespace. The process descriptors (pidfd), opened before that and
alive after it, prove that no id was reused.
Sources: unix(7), SO_PEERCRED; memfd_create(2); pidfd_open(2); process_vm_readv(2); prctl(2), PR_SET_PTRACER.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

from cpulaunch.system.files.paths import is_ambiguous, is_unmapped
from cpulaunch.worker.ccl.memory.library import SharedGroup, bytes_needed, load
from cpulaunch.worker.ccl.wire.errors import PeerLostError, UnavailableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

SOCKET_KEY, VERDICT_KEY = "memory/socket", "memory/verdict"
POLL_SECONDS = 0.02
"""Interval at which rank 0 checks the store for a rank that cannot connect, and such a rank tries again."""
NONCE_BYTES, REASON_BYTES = 16, 1000
MEMBER = struct.Struct(f"<iiQ{NONCE_BYTES}s")
"""A member: its rank, its process id (as rank 0 sees it), and the address and value of its random number."""
CREDENTIALS = struct.Struct("iII")
"""struct ucred: process id, user, group."""
ELSEWHERE = "ranks are on several hosts"
FORBIDDEN = "the kernel does not permit ranks to access each other's memory"
YES = "yes"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PR_SET_PTRACER, _PTRACER_ANY, _PTRACER_NONE = 0x59616D61, ctypes.c_ulong(-1), ctypes.c_ulong(0)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_lock = threading.Lock()
_joining: list[None] = []
"""One for each group that a thread of this process is joining."""


@contextmanager
def _readable() -> Iterator[None]:
    """Effect: with Yama, other processes may read this one while a thread is in this context, and no longer."""
    with _lock:
        _joining.append(None)
        _libc.prctl(_PR_SET_PTRACER, _PTRACER_ANY, 0, 0, 0)  # Fails, harmlessly, in a kernel without Yama.
    try:
        yield
    finally:  # All ranks of the thread's group have read their numbers, or will not.
        with _lock:
            _joining.pop()
            if not _joining:
                _libc.prctl(_PR_SET_PTRACER, _PTRACER_NONE, 0, 0, 0)


@_readable()
def join_memory(store: Any, *, rank: int, size: int, seconds: float) -> SharedGroup:
    """This rank's view of the group's shared memory, once all ranks have joined.

    Raises: UnavailableError, in all ranks and with the same reason, if one of them cannot join; PeerLostError if one
    does not within `seconds`.
    """
    nonce = ctypes.create_string_buffer(os.urandom(NONCE_BYTES), NONCE_BYTES)
    mine = MEMBER.pack(rank, os.getpid(), ctypes.addressof(nonce), nonce.raw)
    try:
        with ExitStack() as resources:
            join = _host if rank == 0 else _join
            group = join(store, mine, size=size, deadline=time.monotonic() + seconds, resources=resources)
            group.set_timeout(seconds)
            return group
    except OSError as error:
        elsewhere = isinstance(error, ConnectionRefusedError)
        raise UnavailableError(_agree(store, ELSEWHERE if elsewhere else f"rank {rank}: {error}")) from None


def _agree(store: Any, verdict: str) -> str:
    """The verdict of the rank that was first: all ranks must act on the same one.

    A TCPStore without libuv, which was torch's default before 2.4, does not wake those who wait for the key.
    """
    agreed: bytes = store.compare_set(VERDICT_KEY, "", verdict)
    return agreed.decode()


def _host(store: Any, mine: bytes, *, size: int, deadline: float, resources: ExitStack) -> SharedGroup:
    """Rank 0's view. Raises: OSError, UnavailableError, PeerLostError."""
    try:
        return _host_members(store, mine, size, deadline, resources)
    except OSError as error:
        verdict = _agree(store, f"rank 0: {error}")
        store.set(SOCKET_KEY, "")  # Ranks that wait for it read the verdict, which must be there: see _agree.
        raise UnavailableError(verdict) from None


def _host_members(store: Any, mine: bytes, size: int, deadline: float, resources: ExitStack) -> SharedGroup:
    _check_user()
    if load() is None:
        raise OSError("cpulaunch was installed without a C compiler")
    descriptor = os.memfd_create("cpulaunch-ccl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    resources.callback(os.close, descriptor)
    os.ftruncate(descriptor, bytes_needed(size))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    listener = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    name = f"cpulaunch-ccl-{os.urandom(16).hex()}"
    listener.bind(f"\0{name}")
    listener.listen(size)
    store.set(SOCKET_KEY, name)
    members = dict(_accepted(listener, store, size, deadline, resources))
    roster = b"".join([mine, *(members[rank][1] for rank in range(1, size))])
    for connection, _ in members.values():
        socket.send_fds(connection, [roster], [descriptor])
    group, reason = _verified(roster, descriptor, rank=0, deadline=deadline)
    for connection, _ in members.values():
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        answer = connection.recv(REASON_BYTES).decode() or "-a rank exited during set-up"
        reason = reason or answer[1:]
    verdict = _agree(store, reason or YES)
    for connection, _ in members.values():
        with suppress(OSError):  # The rank has exited, which a collective of the others will show.
            connection.send(verdict.encode())
    return _decided(group, verdict)


def _decided(group: SharedGroup | None, verdict: str) -> SharedGroup:
    """The group, if the verdict is yes. Raises: UnavailableError."""
    if group is not None and verdict == YES:
        return group
    if group is not None:
        group.close()
    raise UnavailableError(verdict)


def _accepted(
    listener: socket.socket, store: Any, size: int, deadline: float, resources: ExitStack
) -> Iterator[tuple[int, tuple[socket.socket, bytes]]]:
    """The rank, connection and packed member of every other rank. Raises: UnavailableError, PeerLostError, OSError."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    waiting: dict[int, tuple[socket.socket, int]] = {}
    found: set[int] = set()
    while len(found) < size - 1:
        if store.check([VERDICT_KEY]):
            raise UnavailableError(store.get(VERDICT_KEY).decode())
        if time.monotonic() > deadline:
            raise PeerLostError("Timed out waiting for all ranks of the group to join")
        for descriptor, _ in poll.poll(POLL_SECONDS * 1000):
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                process, user, _ = _credentials(connection)
                if user == os.geteuid():
                    resources.enter_context(connection)
                    waiting[connection.fileno()] = connection, process
                    poll.register(connection, select.POLLIN)
                else:
                    connection.close()  # Not a rank of the group, and there is no end of those: none is kept.
                continue
            connection, process = waiting.pop(descriptor)
            poll.unregister(descriptor)
            with suppress(ConnectionResetError, struct.error):  # Not a rank of the group after all.
                rank, _, address, nonce = MEMBER.unpack(connection.recv(MEMBER.size))
                if rank in found or not 0 < rank < size:
                    connection.close()
                    continue
                found.add(rank)
                yield rank, (connection, MEMBER.pack(rank, process, address, nonce))


def _check_user() -> None:
    """Raises: OSError in a user namespace where strangers show the number of this user."""
    user = os.geteuid()
    if is_unmapped(user) or is_ambiguous(user):
        raise OSError("users without a number in this user namespace look like this one")


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process id, user and group of the other end, as the kernel knows them."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, group = CREDENTIALS.unpack(packed)
    return process, user, group


def _join(store: Any, mine: bytes, *, size: int, deadline: float, resources: ExitStack) -> SharedGroup:
    """Another rank's view. Raises: OSError, UnavailableError, PeerLostError."""
    name = store.get(SOCKET_KEY).decode()
    if not name:
        raise UnavailableError(store.get(VERDICT_KEY).decode())
    _check_user()
    connection = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    _connect(connection, name, deadline)
    if _credentials(connection)[1] != os.geteuid():
        raise OSError("rank 0 belongs to another user")
    rank = MEMBER.unpack(mine)[0]
    try:
        connection.send(mine)
        roster, descriptors, _, _ = socket.recv_fds(connection, MEMBER.size * size, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            raise EOFError
        resources.callback(os.close, descriptors[0])
        group, reason = _verified(roster, descriptors[0], rank=rank, deadline=deadline)
        connection.send(f"-{reason}".encode()[:REASON_BYTES])
        return _decided(group, connection.recv(REASON_BYTES).decode() or _agree(store, "rank 0 gave up"))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        raise UnavailableError(_agree(store, "rank 0 gave up")) from None
    except TimeoutError:
        raise PeerLostError("Timed out waiting for all ranks of the group to join") from None


def _connect(connection: socket.socket, name: str, deadline: float) -> None:
    """Effect: connects; also if strangers have filled the listener's queue, which is an error of a Unix socket."""
    while True:
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            return connection.connect(f"\0{name}")
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 accepts no connection") from None
            time.sleep(POLL_SECONDS)


def _verified(roster: bytes, descriptor: int, *, rank: int, deadline: float) -> tuple[SharedGroup | None, str]:
    """This rank's view of the group, or None and the reason why it has none."""
    members = list(MEMBER.iter_unpack(roster))
    if [member[0] for member in members] != list(range(len(members))):
        return None, f"rank {rank}: two ranks have the same number"
    processes = [process for _, process, _, _ in members]
    pidfds = [-1 if other == rank else _open_pidfd(process) for other, process in enumerate(processes)]
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise OSError("the shared memory belongs to another user")
        _read_nonces(members, pidfds, rank)
        memory = mmap.mmap(descriptor, bytes_needed(len(members)))
        seconds = max(0.1, deadline - time.monotonic())
        return SharedGroup(memory, rank=rank, processes=processes, pidfds=pidfds, seconds=seconds), ""
    except (OSError, ValueError) as error:
        for pidfd in pidfds:
            if pidfd >= 0:
                os.close(pidfd)
        return None, str(error) if str(error) == FORBIDDEN else f"rank {rank}: {error}"


def _open_pidfd(process: int) -> int:
    """A descriptor of the process; -1 on Linux before 5.3, or where a filter forbids it."""
    with suppress(OSError):
        return os.pidfd_open(process)
    return -1


def _read_nonces(members: Sequence[tuple[int, int, int, bytes]], pidfds: Sequence[int], rank: int) -> None:
    """Raises: OSError unless every other process has its random number at the address that it told."""
    found = ctypes.create_string_buffer(NONCE_BYTES)
    for other, process, address, nonce in members:
        if other == rank:
            continue
        here, there = (array.array("L", (start, NONCE_BYTES)) for start in (ctypes.addressof(found), address))
        pieces = [each.buffer_info()[0] for each in (here, there)]
        read = _libc.process_vm_readv(process, ctypes.c_void_p(pieces[0]), 1, ctypes.c_void_p(pieces[1]), 1, 0)
        if read != NONCE_BYTES or found.raw != nonce:
            raise OSError(FORBIDDEN)
        if pidfds[other] >= 0:
            poll = select.poll()  # select() does not support descriptors above 1023.
            poll.register(pidfds[other], select.POLLIN)
            if poll.poll(0):
                raise OSError(f"rank {other} has exited")
