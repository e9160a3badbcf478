"""The kernel's counters of this process and its threads.

Source: getrusage(2); proc(5), /proc/PID/task/TID/schedstat (time on a CPU, time waiting for one, in ns) and status.
"""

from __future__ import annotations

import os
import resource
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

THREAD_FIELDS = ("utime", "stime", "minflt", "majflt", "nvcsw", "nivcsw")
"""Of getrusage: seconds in user and system mode, faults without and with reads, voluntary and other switches."""


def read_counters() -> dict[str, float]:
    """All that only grows: of this thread, of the process, and of the process's threads together.

    `wall`: the time at which it was read, also of reading, in which other threads may run.
    """
    thread = resource.getrusage(resource.RUSAGE_THREAD)
    process = resource.getrusage(resource.RUSAGE_SELF)
    found = {f"thread_{name}": float(getattr(thread, f"ru_{name}")) for name in THREAD_FIELDS}
    found |= {f"process_{name}": float(getattr(process, f"ru_{name}")) for name in THREAD_FIELDS}
    found["thread_cpu"] = time.thread_time()
    found["process_cpu"] = time.process_time()
    delays = _delays()
    found["thread_delay"] = delays.get(threading.get_native_id(), 0.0)
    found["process_delay"] = sum(delays.values())
    found["wall"] = time.perf_counter()
    found["rss"] = float(_resident_bytes())
    return found


def thread_delay() -> float:
    """Seconds for which this thread was ready to run and waited for a CPU."""
    parts = _text(f"/proc/self/task/{threading.get_native_id()}/schedstat").split()
    return int(parts[1]) * 1e-9 if len(parts) > 1 else 0.0


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """How much each counter has grown; threads may have ended meanwhile."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _delays() -> dict[int, float]:
    """By thread: seconds for which it was ready to run and waited for a CPU."""
    found = {}
    for name in _names("/proc/self/task"):
        parts = _text(f"/proc/self/task/{name}/schedstat").split()
        if len(parts) >= 2 and name.isdigit():
            found[int(name)] = int(parts[1]) * 1e-9
    return found


def busy_threads() -> list[dict[str, Any]]:
    """Each thread's CPU seconds so far, those for which it waited for a CPU, and the CPUs it may use, busiest first.

    Shape: [{"id", "seconds", "delay", "cpus"}].
    """
    found = []
    for name in _names("/proc/self/task"):
        parts = _text(f"/proc/self/task/{name}/schedstat").split()
        status = dict(line.partition(":\t")[::2] for line in _text(f"/proc/self/task/{name}/status").splitlines())
        if len(parts) > 1 and status:
            seconds, delay = (int(each) * 1e-9 for each in parts[:2])
            cpus = status.get("Cpus_allowed_list", "")
            found.append({"id": int(name), "seconds": seconds, "delay": delay, "cpus": cpus})
    return sorted(found, key=lambda each: -float(str(each["seconds"])))


def _resident_bytes() -> int:
    parts = _text("/proc/self/statm").split()
    return int(parts[1]) * os.sysconf("SC_PAGESIZE") if len(parts) > 1 else 0


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
