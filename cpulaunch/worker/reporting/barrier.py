"""The start barrier: workers wait until all of their launch have arrived, so that they are measured together.

A worker says "I am here" in one named pipe of the run's directory and reads from another, into which nobody writes:
its end comes when the launch closes it, for the barrier or because the launch is over. Source: fifo(7), pipe(7).
"""

from __future__ import annotations

import os

from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.worker.reporting.process_identity import is_worker

ARRIVALS, GATE = "arrivals", "gate"
"""The named pipes; launch/barrier.py makes them."""

_home = os.getpid()
_arrived = False


def wait() -> None:
    """Effect: blocks until every worker of the launch has arrived or ended, or the launch is over.

    Returns at once without a barrier, the second time, in children, and in all but a worker's first process to arrive.
    Signals are handled meanwhile.
    """
    global _arrived
    if _arrived or os.getpid() != _home:
        return
    _arrived = True
    path = os.environ.get(EVENTS_VARIABLE)
    if path and not _is_child() and _arrive(path):
        _pass(os.path.join(os.path.dirname(path), GATE))


def _is_child() -> bool:
    """Whether the worker started this process: the plugin knows, or multiprocessing (as DataLoader's worker)."""
    import sys

    if not is_worker():
        return True
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def _arrive(events: str) -> bool:
    """Whether this process is its worker's first. Effect: the launch knows that the worker is here."""
    folder, name = os.path.split(events)
    worker = name.removeprefix("worker-").removesuffix(".jsonl")
    try:
        arrivals = os.open(os.path.join(folder, ARRIVALS), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # No barrier, or the launch is over.
    try:
        os.close(os.open(f"{events}.arrived", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.write(arrivals, f"{worker}\n".encode())
    except OSError:
        return False
    finally:
        os.close(arrivals)
    return True


def _pass(gate: str) -> None:
    """Effect: waits until nobody holds the gate's other end."""
    try:
        # Not blocking until there is a writer: the barrier may have been lifted already.
        end = os.open(gate, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.set_blocking(end, True)
        os.read(end, 1)
    finally:
        os.close(end)
