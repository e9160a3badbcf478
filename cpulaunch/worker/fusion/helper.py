"""The program of the helper process: tries graphs that its worker sends, until the worker ends or closes the socket.

This file is run as a script, in three processes. The one that the worker starts forks the helper and ends, so that the
helper is no child of the worker: a program that waits for all of its children must not find one that it did not start.
The helper itself only waits for the worker's end. Its child does the work and ends with it, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import site
import socket
import sys
from contextlib import suppress

LEAST_PRIORITY = 19


def start(requests: int, worker: int) -> None:
    """Effect: forks the helper, reports its process id and, where there are any, its pidfd, and ends this process.

    `requests`: descriptor of the socket. `worker`: a pidfd of the worker; -1 if there is none.
    The helper leaves the worker's process group, whose signals are not meant for it, but not its session: the kernel
    may schedule each session as a group with the same share of the CPUs, within which alone a low priority counts.
    Source: sched(7), The autogroup feature.
    """
    os.setpgid(0, 0)
    pid = os.fork()
    if pid == 0:
        help_until_end(requests, worker)
    descriptors = []
    with suppress(OSError, AttributeError):
        descriptors.append(os.pidfd_open(pid))
    with socket.socket(fileno=requests) as own:
        socket.send_fds(own, [f"{pid}\n".encode()], descriptors)
    os._exit(0)


def help_until_end(requests: int, worker: int) -> None:
    """Effect: answers requests until the worker has ended or closed the socket, or its own child has ended.

    The worker's end is noticed by its pidfd too, in case a child of the worker has inherited the other end.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # A worker that ignores it hands that on.
    end_first()
    helper = os.getpid()
    child_end, kept_open = os.pipe()
    child = os.fork()
    if child == 0:
        answer_requests(requests, helper)
        os._exit(0)
    os.close(kept_open)
    poll = select.poll()
    for descriptor, event in ((requests, select.POLLRDHUP), (worker, select.POLLIN), (child_end, select.POLLIN)):
        if descriptor >= 0:
            poll.register(descriptor, event)
    poll.poll()
    os.kill(child, signal.SIGKILL)
    os._exit(0)


def answer_requests(requests: int, helper: int) -> None:
    """Effect: tries graphs until the socket is closed. Its first line is the folders of modules, and another folder.

    `helper`: the parent process.
    """
    yield_cpus()
    with open(requests, "rb") as lines:
        context = json.loads(lines.readline() or "{}")
        if not context:
            return
        site.main()  # The option -S left it out, so that the worker does not wait for it.
        sys.path[:] = context["path"]
        from cpulaunch.system.libc import die_with_parent, refuse_core_dumps

        die_with_parent(signal.SIGKILL, parent=helper)
        refuse_core_dumps()
        from cpulaunch.worker.fusion.trial import tried
        from cpulaunch.worker.fusion.wire import decode_request, encode_outcome

        for line in lines:
            fields, described = decode_request(line)
            answer = encode_outcome(fields["key"], tried(context["folder"], fields, described))
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


def end_first() -> None:
    """Effect: where memory runs out, the kernel ends this process first. Source: proc(5), oom_score_adj."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


if __name__ == "__main__":
    start(int(sys.argv[1]), int(sys.argv[2]))
