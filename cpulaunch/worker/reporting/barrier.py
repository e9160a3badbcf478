"""The worker's side of the start barrier: all workers of a launch continue at the same moment, to be measured together.

A worker writes its number to the named pipe ARRIVALS in the run directory and then waits at the named pipe GATE. The
launch writes nothing to GATE: the wait ends when the launch closes its end, either because all workers have arrived or
because the launch has ended. Source: fifo(7), pipe(7).

Any process of a worker can open these pipes, and read what others write or keep GATE open. So a worker repeats its
number and makes a file that the launch looks for, and goes on without GATE, which the launch removes before it closes
its end.
"""

from __future__ import annotations

import os
import select

from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.system.files.writing import claim_name, open_pipe
from cpulaunch.worker.reporting.process_identity import is_worker

ARRIVALS, GATE = "arrivals", "gate"
"""The named pipes, created by launch/monitor/start_barrier.py."""

REPEAT_SECONDS = 10.0
"""Between two looks of a waiting worker: each wakes the launch."""

_first_pid = os.getpid()
_arrived = False


def wait() -> None:
    """Effect: blocks until every worker of the launch has arrived or exited, or the launch has ended.

    Returns immediately if the launch has no barrier, at every call but the first, in child processes, and if another
    process of the same worker has arrived already. Signal handlers run while it blocks.
    """
    global _arrived
    if _arrived or os.getpid() != _first_pid:
        return
    _arrived = True
    path = os.environ.get(EVENTS_VARIABLE)
    if path and not _is_child() and _arrive(path):
        _wait_for_gate(path)


def _is_child() -> bool:
    """Whether this is a child process of the worker, by the plugin's variable or as a process of multiprocessing."""
    import sys

    if not is_worker():
        return True
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def _arrive(events: str) -> bool:
    """Whether this is the first process of its worker to arrive. Effect: reports the arrival to the launch.

    Where no file can be made, as without inodes, every process is.
    """
    return _report_arrival(events) and claim_name(f"{events}.arrived")


def _report_arrival(events: str) -> bool:
    """Whether the launch has a barrier. Effect: tells it that the worker has arrived; of repetitions it takes none."""
    folder, name = os.path.split(events)
    worker = name.removeprefix("worker-").removesuffix(".jsonl")
    try:
        arrivals = open_pipe(os.path.join(folder, ARRIVALS), os.O_WRONLY)
    except OSError:
        return False  # No barrier, or the launch has ended.
    try:
        os.write(arrivals, f"{worker}\n".encode())
    except OSError:
        return False
    finally:
        os.close(arrivals)
    return True


def _wait_for_gate(events: str) -> None:
    """Effect: blocks until the launch removes the gate and closes its write end."""
    gate = os.path.join(os.path.dirname(events), GATE)
    try:
        end = open_pipe(gate, os.O_RDONLY)
    except OSError:
        return
    try:
        while not _is_readable(end, REPEAT_SECONDS) and os.path.exists(gate) and _report_arrival(events):
            continue
    finally:
        os.close(end)


def _is_readable(end: int, seconds: float) -> bool:
    """Whether a read does not block, or will not within these seconds.

    By select(2), which takes no descriptor above 1,023, only where eventlet has removed poll(2).
    """
    if not hasattr(select, "poll"):
        return bool(select.select([end], [], [], seconds)[0])
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
