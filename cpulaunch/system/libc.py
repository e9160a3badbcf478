"""Calls of the C library that Python does not offer; ctypes is imported only when one is made."""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
"""Source: Linux, include/uapi/linux/prctl.h."""

AF_UNIX, SOCK_STREAM, SHUT_WR = 1, 1, 1
"""Source: Linux, include/linux/socket.h and net.h, where SOCK_CLOEXEC is O_CLOEXEC."""

MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
"""Source: Linux, include/linux/socket.h."""

SIGNAL_SET_BITS = 1024
"""The size of sigset_t in glibc and musl."""


_opened: list[Any] = []


def libc() -> Any:
    """The C library of this process. Effect: imports ctypes, which takes about 3 ms."""
    if not _opened:
        _opened.append(ctypes_module().CDLL(None, use_errno=True))
    return _opened[0]


def ctypes_module() -> Any:
    """The module ctypes. Raises: OSError ENOSYS where this Python was built without it."""
    try:
        import ctypes
    except ImportError:
        raise OSError(errno.ENOSYS, "this Python has no ctypes") from None
    return ctypes


def call(name: str, *args: Any) -> int:
    """The result of a C function. Raises: OSError with its errno if it is negative, ENOSYS if it does not exist."""
    try:
        function = getattr(libc(), name)
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    result = int(function(*args))
    if result < 0:
        code = ctypes_module().get_errno()
        raise OSError(code, os.strerror(code))
    return result


def is_linux() -> bool:
    """Whether this is Linux (a function, so that every branch is type-checked everywhere)."""
    return sys.platform.startswith("linux")


def die_with_parent(signum: int, *, parent: int) -> None:
    """Effect: the kernel sends this process `signum` when the thread that forked it ends; exec keeps the setting.

    Where prctl is refused or missing, only the guard process ends the workers of a killed launcher.
    Source: prctl(2) PR_SET_PDEATHSIG. The parent may have ended before the call, hence the comparison.
    """
    if is_linux():
        _control(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> bool:
    """Whether descendants whose parent ends become children of this process from now on.

    Effect: they do, unless prctl is refused or missing.
    Source: prctl(2) PR_SET_CHILD_SUBREAPER, Linux 3.4; fork does not inherit it.
    """
    return is_linux() and _control(PR_SET_CHILD_SUBREAPER, 1)


def refuse_core_dumps() -> None:
    """Effect: this process and those it forks leave no core dump, to a file or to a program, unless prctl is refused.

    A limit of 0 (RLIMIT_CORE) does not keep the kernel from starting the program that core_pattern names. From now on
    only root may change the files of this process in /proc. Source: prctl(2) PR_SET_DUMPABLE; core(5).
    """
    if is_linux():
        _control(PR_SET_DUMPABLE, 0)


def signal_descriptor(numbers: Iterable[int]) -> int | None:
    """A descriptor that is readable while one of these blocked signals is pending; None where there is none.

    Source: signalfd(2), Linux 2.6.27.
    """
    if not is_linux():
        return None
    mask = sum(1 << number - 1 for number in set(numbers))
    try:
        word = ctypes_module().c_ulong
        bits = 8 * ctypes_module().sizeof(word)
        words = [mask >> shift & (1 << bits) - 1 for shift in range(0, SIGNAL_SET_BITS, bits)]
        return call("signalfd", -1, (word * len(words))(*words), os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None


def private_pipe() -> tuple[int, int]:
    """The read and the write end of a pipe that no other process can open; in a sandbox or on macOS, of any pipe.

    The ends of another pipe can be opened through /proc/PID/fd, by any process of the same user: to read what was
    written, to write, and to keep it from ending. Sockets cannot. Source: Linux, net/socket.c, sock_no_open.
    """
    if not is_linux():
        return os.pipe()
    try:
        ends = (ctypes_module().c_int * 2)()
        call("socketpair", AF_UNIX, SOCK_STREAM | os.O_CLOEXEC, 0, ends)
    except OSError:
        return os.pipe()
    return ends[0], ends[1]


def send_at_once(fd: int, byte: int) -> None:
    """Effect: writes a byte to a non-blocking pipe; a private one need not be, as another process may have changed it.

    Where a sandbox refuses send(2), it has to be, or this waits for room.
    Raises: OSError; BlockingIOError if there is no room. Source: pidfd_getfd(2); fcntl(2), F_SETFL.
    """
    try:
        call("send", fd, bytes([byte]), 1, MSG_DONTWAIT | MSG_NOSIGNAL)
    except OSError as error:
        if error.errno not in (errno.ENOTSOCK, errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
        os.write(fd, bytes([byte]))


def receive_at_once(fd: int) -> int:
    """How many bytes, of one, were read from this end of a private pipe; 0 at its end.

    Raises: OSError; BlockingIOError if there is none yet.
    """
    return call("recv", fd, (ctypes_module().c_char * 1)(), 1, MSG_DONTWAIT)


def stop_writing(fd: int) -> None:
    """Effect: the other end of a private pipe reads its end, though it writes the pipe; of any other pipe, nothing.

    Source: shutdown(2).
    """
    try:
        call("shutdown", fd, SHUT_WR)
    except OSError:
        return


def _control(option: int, value: int) -> bool:
    """Whether prctl(2) accepted the option; a sandbox may refuse it."""
    try:
        call("prctl", option, value, 0, 0, 0)
    except OSError:
        return False
    return True
