"""What the hooks add up: seconds of this process's main thread in loaders, collectives and backward passes."""

from __future__ import annotations

import threading
from time import perf_counter, thread_time
from typing import Any

FIELDS = (
    *("data_seconds", "data_cpu", "data_calls", "fetch_seconds", "fetch_cpu", "collate_seconds"),
    *("collective_seconds", "collective_cpu", "collective_calls"),
    *("backward_seconds", "backward_cpu", "backward_collective_seconds"),
)


class Activity:
    """Sums by name (FIELDS), and `now`: what the thread does at the moment, for the sampler.

    `loader`: the id of the last DataLoader's iterator. `loader_workers`, `prefetched`: its worker processes and the
    batches that each loads ahead; `batch_bytes`: of a batch. `record`: makes a named region of the profiler while it
    runs; None while it does not.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Effect: nothing has been timed, as in a forked process, whose only thread is the measured one."""
        self.totals = dict.fromkeys(FIELDS, 0.0)
        self.loader = 0
        self.loader_workers: int | None = None
        self.prefetched = 0
        self.batch_bytes = 0
        self.record: Any = None
        self.measure_this_thread()

    def measure_this_thread(self) -> None:
        """Effect: it is the measured one.

        Python gives the identifier of a thread that has ended to a new one; the kernel's is free again much later.
        """
        self.now = ""
        self.thread, self.native_thread = threading.get_ident(), threading.get_native_id()

    def is_measured_thread(self) -> bool:
        """Whether this thread is the measured one."""
        return threading.get_ident() == self.thread and threading.get_native_id() == self.native_thread

    def timed(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result. Effect: adds its time to the sums of this name, unless it is inside another of them.

        Only the thread whose steps are measured counts.
        """
        if self.now == name or not self.is_measured_thread():
            return function(*args, **kwargs)
        before, self.now = self.now, name
        region = None if self.record is None else self.record(f"cpulaunch::{name}")
        if region is not None:
            region.__enter__()
        cpu, start = thread_time(), perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds, used = perf_counter() - start, thread_time() - cpu
            if region is not None:
                region.__exit__(None, None, None)
            self.now = before
            self._add(name, seconds, used, inside=before)

    def _add(self, name: str, seconds: float, used: float, *, inside: str) -> None:
        totals = self.totals
        totals[f"{name}_seconds"] += seconds
        totals[f"{name}_cpu"] += used
        if f"{name}_calls" in totals:
            totals[f"{name}_calls"] += 1
        if inside == "backward" and name == "collective":
            totals["backward_collective_seconds"] += seconds
