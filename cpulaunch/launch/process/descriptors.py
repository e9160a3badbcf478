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
"""For this Python, what it inherited, and what a run with a start barrier holds open."""


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

    Effect: raises this process's soft limit to what this many workers need.
    Raises: LaunchError if the hard limit is lower than that.
    """
    needed = workers * PER_WORKER + SPARE
    if os.sysconf("SC_OPEN_MAX") >= needed:  # The soft limit, without an import.
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard != resource.RLIM_INFINITY and hard < needed:
        source = f"{workers} {'worker needs' if workers == 1 else 'workers need'} {needed}"
        raise LaunchError("too few open files allowed", value=hard, source=source, hint=f"ulimit -Hn {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return DescriptorLimit(soft=soft, hard=hard)


def restore_fd_limit(limit: DescriptorLimit) -> None:
    """Effect: sets this process's limit on open files back to this one. Raises: OSError."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (limit.soft, limit.hard))


def fd_shortage_error(error: OSError) -> Exception:
    """A LaunchError with a hint if this error means that descriptors ran out; else the error itself.

    They can run out below the raised limit where this process inherited many.
    """
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return error
    return LaunchError("cannot open another file", value=os.strerror(error.errno), hint="ulimit -n 4096")


def fork_error(error: OSError) -> LaunchError:
    """The LaunchError for a failed fork."""
    hint = "check `ulimit -u` and the cgroup's pids.max"
    return LaunchError("cannot create a process", value=os.strerror(error.errno or 0), source="fork", hint=hint)
