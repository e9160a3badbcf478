"""The program of the helper process: tries graphs that its worker sends, until the worker ends or closes the pipe."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from contextlib import suppress

LEAST_PRIORITY = 19
POLL_SECONDS = 1.0
CHUNK_BYTES = 1 << 20


def main(requests: int, parent: int) -> None:
    """Effect: reads requests from the socket with this descriptor, answers them, and returns when there are no more.

    The worker's end is noticed by the closed socket, and by the number of the parent process in case a child of the
    worker has inherited the other end.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # A worker that ignores it hands that on.
    yield_cpus()
    from cpulaunch.worker.fusion.trial import Trial
    from cpulaunch.worker.fusion.wire import decode_request, encode_outcome

    def gone() -> bool:
        return os.getppid() != parent or _is_closed(requests)

    pending = b""
    while not gone():
        if not _is_readable(requests):
            continue
        chunk = os.read(requests, CHUNK_BYTES)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            fields, described = decode_request(line)
            answer = encode_outcome(fields["key"], Trial(fields, described, gone).outcome())
            while answer:
                answer = answer[os.write(requests, answer) :]


def yield_cpus() -> None:
    """Effect: this process, and the threads and processes it starts, run on CPUs that are idle otherwise.

    A lower priority alone would not do: a thread of the worker that loses its CPU for a moment lets all others wait.
    Source: sched(7), SCHED_IDLE.
    """
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.nice(LEAST_PRIORITY)


def _is_readable(requests: int) -> bool:
    """Whether the socket has data or is closed; waits for it, but not long."""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    return bool(poll.poll(POLL_SECONDS * 1000))


def _is_closed(requests: int) -> bool:
    """Whether the other end of the socket is closed."""
    poll = select.poll()
    poll.register(requests, select.POLLRDHUP | select.POLLHUP)
    return bool(poll.poll(0))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
