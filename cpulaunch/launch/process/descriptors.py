"""Room for the descriptors of many workers: pipes, logs, and the pipes that report failed starts."""

from __future__ import annotations

import errno
import os

from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import record

PER_WORKER = 8
"""At most: two pipes with two ends, a log, and a failure pipe with two ends or a read end and a process."""

SPARE = 32
"""For this Python, what it was started with, and what a run with a start barrier holds open."""


@record(kw_only=False)
class DescriptorLimit:
    """RLIMIT_NOFILE as it was: workers get it back, since programs that use select(2) rely on a low one."""

    soft: int
    hard: int


def raise_fd_limit(workers: int) -> DescriptorLimit | None:
    """The limit before it was raised; None if there is room.

    Effect: this process may open what the workers need. Raises: LaunchError if the hard limit forbids it.
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
    """Effect: the limit is what it was."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (limit.soft, limit.hard))


def fd_shortage_error(error: OSError) -> Exception:
    """The error to raise for this one: if descriptors ran out all the same, as many were inherited, what to do."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return error
    return LaunchError("no file could be opened", value=os.strerror(error.errno), hint="ulimit -n 4096")


def fork_error(error: OSError) -> LaunchError:
    """The error for a fork that failed."""
    hint = "check `ulimit -u` and the cgroup's pids.max"
    return LaunchError("no process could be made", value=os.strerror(error.errno or 0), source="fork", hint=hint)
