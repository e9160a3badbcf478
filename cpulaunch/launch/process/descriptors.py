"""File descriptors: the standard ones, those of a worker, and the limit on open files."""

from __future__ import annotations

import errno
import os

from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import record

STDIN, STDOUT, STDERR = 0, 1, 2

PER_WORKER = 8
"""At most: two pipes with two ends, a log, and an error pipe with two ends or a read end and a pidfd."""

SPARE = 32
"""For this Python, and what a run with a start barrier holds open."""

RESERVED = 8
"""What the removal of a run's directory has open at once."""

MORE_DESCRIPTORS = "ulimit -n 4096"

_reserved: list[int] = []


@record
class StdioFds:
    """The descriptors that become a worker's 0, 1 and 2. The launcher closes `owned` after the fork."""

    stdin: int
    stdout: int
    stderr: int
    owned: tuple[int, ...]


@record(kw_only=False)
class DescriptorLimit:
    """RLIMIT_NOFILE before it was raised. Workers get it back: programs that use select(2) rely on a low one."""

    soft: int
    hard: int


def open_standard_descriptors() -> None:
    """Effect: opens 0, 1 and 2 on the null device where they are closed, so that no pipe gets one of these numbers."""
    for fd in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest free number, which is this one.
            os.set_inheritable(fd, True)


def raise_fd_limit(workers: int) -> DescriptorLimit | None:
    """The limit on open files before it was raised; None if it was high enough.

    Effect: raises this process's soft limit to what this many workers need, beside what this process has inherited.
    Raises: LaunchError if the hard limit is lower than what they need alone.
    """
    needed = workers * PER_WORKER + SPARE
    wanted = needed + _open_count()
    if os.sysconf("SC_OPEN_MAX") >= wanted:  # The soft limit, without an import.
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    if hard != resource.RLIM_INFINITY and hard < needed:
        source = f"{workers} {'worker needs' if workers == 1 else 'workers need'} {needed}"
        raise LaunchError("too few open files allowed", value=hard, source=source, hint=f"ulimit -Hn {needed}")
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)  # Of what this process has inherited, numbers may be above the limit.
    if soft == wanted:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return DescriptorLimit(soft=soft, hard=hard)


def _open_count() -> int:
    """How many descriptors this process has open; 0 where that is unknown, as without /proc or a free one."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def restore_fd_limit(limit: DescriptorLimit) -> None:
    """Effect: sets this process's limit on open files back to this one. Raises: OSError."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (limit.soft, limit.hard))


def reserve_descriptors() -> None:
    """Effect: this process, and each that it forks, holds some descriptors until it releases them. Raises: LaunchError.

    A guard needs them when it removes what is left of a launch whose supervisor has run out of descriptors.
    """
    try:
        while len(_reserved) < RESERVED:
            _reserved.append(os.dup(STDERR))
    except OSError as error:
        release_descriptors()
        raise fd_shortage_error(error) from None


def release_descriptors() -> None:
    """Effect: this process can open those descriptors again that `reserve_descriptors` has held."""
    while _reserved:
        os.close(_reserved.pop())


def is_fd_shortage(error: OSError) -> bool:
    """Whether descriptors ran out: those of this process, or of the host."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def fd_shortage_error(error: OSError) -> Exception:
    """A LaunchError with a hint if this error means that descriptors ran out; else the error itself.

    They can run out below the raised limit where this process inherited many.
    """
    if not is_fd_shortage(error):
        return error
    return LaunchError("cannot open another file", value=os.strerror(error.errno or 0), hint=MORE_DESCRIPTORS)


def stdio_error(error: OSError, *, of: str, count: int) -> LaunchError:
    """The LaunchError for so many workers, `of` a kind, whose standard input and output cannot be opened."""
    if is_fd_shortage(error):
        text = f"cannot open pipes for the {of}"
        return LaunchError(text, value=count, source=error.strerror, hint=MORE_DESCRIPTORS)
    return LaunchError(f"cannot open files for the {of}", value=error.filename, source=error.strerror)


def fork_error(error: OSError) -> LaunchError:
    """The LaunchError for a failed fork."""
    hint = "check `ulimit -u` and the cgroup's pids.max"
    return LaunchError("cannot create a process", value=os.strerror(error.errno or 0), source="fork", hint=hint)
