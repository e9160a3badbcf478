"""Room for the descriptors of many workers: pipes, logs, and the pipes that report failed starts."""

from __future__ import annotations

import os

from cpulaunch.errors import LaunchError
from cpulaunch.record import record

PER_WORKER = 8
"""At most: two pipes with two ends, a log, and a failure pipe with two ends or a read end and a process."""

SPARE = 64


@record(kw_only=False)
class DescriptorLimit:
    """RLIMIT_NOFILE as it was: workers get it back, since programs that use select(2) rely on a low one."""

    soft: int
    hard: int


def make_room(workers: int) -> DescriptorLimit | None:
    """The limit before it was raised; None if there is room.

    Effect: this process may open what the workers need. Raises: LaunchError if the hard limit forbids it.
    """
    needed = workers * PER_WORKER + SPARE
    if needed <= 256:  # Less than any system's default, and no import.
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard != resource.RLIM_INFINITY and hard < needed:
        source = f"{workers} workers need {needed}"
        raise LaunchError("too few open files allowed", value=hard, source=source, hint=f"ulimit -Hn {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return DescriptorLimit(soft=soft, hard=hard)


def give_back(limit: DescriptorLimit) -> None:
    """Effect: the limit is what it was."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (limit.soft, limit.hard))


def no_process(error: OSError) -> LaunchError:
    """The error for a fork that failed."""
    hint = "check `ulimit -u` and the cgroup's pids.max"
    return LaunchError("no process could be made", value=os.strerror(error.errno or 0), source="fork", hint=hint)
