"""The program of the helper process: tries graphs that its worker sends, until the worker ends or closes the socket.

This file is run as a script, in three processes. The one that the worker starts forks the helper and ends, so that the
helper is no child of the worker: a program that waits for all of its children must not find one that it did not start.
The helper itself waits for the worker's end, and looks whether its child gets processor time. The child does the work
and ends with the helper, whatever it is doing.
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cpulaunch.worker.fusion.search import TrialOutcome

LEAST_PRIORITY, LOW_PRIORITY = 19, 5
"""Nice values. At 5, a thread gets a quarter of a CPU on which another thread of ordinary priority always runs.

With a lower share, the program would lose as much time in all, as its threads wait for the slowest of them, and would
have its graphs later.
Source: kernel/sched/core.c, sched_prio_to_weight.
"""

STARVED_SHARE, STARVED_LOOKS = 0.05, 4
"""The child starves if it gets a smaller share of a CPU than that while it wants one, seen so many times in a row."""

STARVED = b"\nstarved\n"


def start(requests: int, worker: int, patience: float) -> None:
    """Effect: forks the helper, reports its process id and, where there are any, its pidfd, and ends this process.

    `requests`: descriptor of the socket. `worker`: a pidfd of the worker; -1 if there is none. `patience`: for how many
    seconds it may starve where no CPU is idle; 0: it takes its share of them.
    The helper leaves the worker's process group, whose signals are not meant for it, but not its session: the kernel
    may schedule each session as a group with the same share of the CPUs, within which alone a low priority counts.
    Source: sched(7), The autogroup feature.
    """
    os.setpgid(0, 0)
    pid = os.fork()
    if pid == 0:
        help_until_end(requests, worker, patience)
    descriptors = []
    with suppress(OSError, AttributeError):
        descriptors.append(os.pidfd_open(pid))
    with socket.socket(fileno=requests) as own:
        socket.send_fds(own, [f"{pid}\n".encode()], descriptors)
    os._exit(0)


def help_until_end(requests: int, worker: int, patience: float) -> None:
    """Effect: answers requests until the worker has ended or closed the socket, or its own child has ended or starved.

    The worker's end is noticed by its pidfd too, in case a child of the worker has inherited the other end. A child
    that runs on idle CPUs cannot be given others later, which takes a privilege: the worker is told that it has starved
    and starts another helper.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # A worker that ignores it hands that on.
    end_first()
    helper = os.getpid()
    child_end, kept_open = os.pipe()
    child = os.fork()
    if child == 0:
        yield_cpus(only_idle=patience > 0)
        answer_requests(requests, helper)
        os._exit(0)
    os.close(kept_open)
    poll = select.poll()
    for descriptor, event in ((requests, select.POLLRDHUP), (worker, select.POLLIN), (child_end, select.POLLIN)):
        if descriptor >= 0:
            poll.register(descriptor, event)
    hungry, (_, before) = 0, wanted_and_had(child)
    pause = patience / STARVED_LOOKS
    while hungry < STARVED_LOOKS and not poll.poll(1000 * pause if pause else None):
        wants, had = wanted_and_had(child)
        hungry = hungry + 1 if wants and had - before < STARVED_SHARE * pause else 0
        before = had
    os.kill(child, signal.SIGKILL)
    if hungry == STARVED_LOOKS:
        os.write(requests, STARVED)
    os._exit(0)


def wanted_and_had(pid: int) -> tuple[bool, float]:
    """Whether the process or a child of it has work to do, and the processor time that they have had, in seconds.

    The process waits for the work of its children. Source: proc(5), /proc/pid/stat and /proc/pid/task/tid/children.
    """
    children: list[str] = []
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        children = file.read().split()
    wants, ticks = bool(children), 0
    for each in (str(pid), *children):
        with suppress(OSError), open(f"/proc/{each}/stat", "rb") as file:  # A name may be cut inside a character.
            state, *fields = file.read().rpartition(b")")[2].split()
            wants = wants or state == b"R"
            ticks += sum(map(int, fields[10:14]))  # Of the process and of those that it has waited for.
    return wants, ticks / os.sysconf("SC_CLK_TCK")


def answer_requests(requests: int, helper: int) -> None:
    """Effect: tries graphs until the socket is closed. Its first line is the folders of modules, and another folder.

    `helper`: the parent process.
    """
    with open(requests, "rb") as lines:
        context = json.loads(lines.readline() or "{}")
        if not context:
            return
        site.main()  # The option -S left it out, so that the worker does not wait for it.
        sys.path[:] = context["path"]
        from cpulaunch.system.libc import die_with_parent, refuse_core_dumps

        die_with_parent(signal.SIGKILL, parent=helper)
        refuse_core_dumps()
        from cpulaunch.worker.fusion.wire import decode_request, encode_outcome

        for line in lines:
            fields, described = decode_request(line)
            answer = encode_outcome(fields["key"], tried(context["folder"], fields, described))
            while answer:
                answer = answer[os.write(requests, answer) :]


def tried(folder: str, fields: dict[str, Any], described: list[Any]) -> TrialOutcome:
    """The outcome of a request, from the folder if it is known by now. Effect: adds a lasting outcome to the folder.

    Only a trial imports torch, which takes a second of processor time: of instances, one tries a graph and the others
    wait for what it finds.
    """
    from cpulaunch.worker.fusion.outcomes import known_or_found

    def find() -> TrialOutcome:
        from cpulaunch.worker.fusion.trial import Trial

        return Trial(fields, described).outcome()

    return known_or_found(folder, fields["key"], find, seconds=float(fields["seconds"]))


def yield_cpus(*, only_idle: bool) -> None:
    """Effect: this process, and the threads and processes it starts, have a low priority.

    `only_idle`: they run on CPUs that are idle otherwise, because a thread of the worker that loses its CPU for a
    moment lets all others wait. Source: sched(7), SCHED_IDLE.
    """
    if only_idle:
        with suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.nice(LEAST_PRIORITY if only_idle else LOW_PRIORITY)


def end_first() -> None:
    """Effect: where memory runs out, the kernel ends this process first. Source: proc(5), oom_score_adj."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


if __name__ == "__main__":
    start(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
