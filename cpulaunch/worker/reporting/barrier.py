"""The worker's side of the start barrier: all workers of a launch continue at the same moment, to be measured together.

A worker writes its number to the named pipe ARRIVALS in the run directory and then reads from the named pipe GATE. The
launch writes nothing to GATE: the read returns when the launch closes its end, either because all workers have arrived
or because the launch has ended. Source: fifo(7), pipe(7).
"""

from __future__ import annotations

import os

from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.system.files.writing import claim_name, open_pipe
from cpulaunch.worker.reporting.process_identity import is_worker

ARRIVALS, GATE = "arrivals", "gate"
"""The named pipes, created by launch/monitor/start_barrier.py."""

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
        _wait_for_gate(os.path.join(os.path.dirname(path), GATE))


def _is_child() -> bool:
    """Whether this is a child process of the worker, by the plugin's variable or as a process of multiprocessing."""
    import sys

    if not is_worker():
        return True
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def _arrive(events: str) -> bool:
    """Whether this is the first process of its worker to arrive. Effect: reports the arrival to the launch.

    Where no file can be made, as without inodes, every process is: the launch takes a second arrival for none.
    """
    folder, name = os.path.split(events)
    worker = name.removeprefix("worker-").removesuffix(".jsonl")
    try:
        arrivals = open_pipe(os.path.join(folder, ARRIVALS), os.O_WRONLY)
    except OSError:
        return False  # No barrier, or the launch has ended.
    if not claim_name(f"{events}.arrived"):
        os.close(arrivals)
        return False
    try:
        os.write(arrivals, f"{worker}\n".encode())
    except OSError:
        return False
    finally:
        os.close(arrivals)
    return True


def _wait_for_gate(gate: str) -> None:
    """Effect: blocks until the launch closes the gate's write end."""
    try:
        end = open_pipe(gate, os.O_RDONLY)  # Does not wait: the launch may have closed the gate already.
    except OSError:
        return
    try:
        os.set_blocking(end, True)
        os.read(end, 1)
    finally:
        os.close(end)
