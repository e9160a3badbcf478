"""The steps that torch's profiler sees."""

from __future__ import annotations

import os
from time import perf_counter, time_ns
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cpulaunch.worker.diagnosis.counters import thread_delay
from cpulaunch.worker.diagnosis.operations import Event, add_up

MOST_EVENTS = 400_000
"""Of a window. What follows is not looked at: a pass in Python takes microseconds for each."""


BACKENDS = ("gloo:", "mpi:", "ccl:")
"""How the names of collectives begin that run in other threads."""
DISTURBED = 0.1
"""Share of the window for which the thread was ready to run and had no CPU."""


class ProfilerWindow:
    """The profiler, for one window. `failure`: why it saw nothing, in words."""

    def __init__(self) -> None:
        self.failure = ""
        self.seconds = self.delay = 0.0
        self._profile: Any = None
        self._start = self._end = 0
        self._result: dict[str, Any] | None = None

    def prepare(self) -> None:
        """Effect: the profiler is initialized, which takes a second."""
        self.start()
        self.stop()
        self._profile = None

    def start(self) -> None:
        """Effect: the profiler runs, unless the program uses it already."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        try:
            self._profile = profile(activities=activities, record_shapes=True, with_flops=True, acc_events=True)
            self._profile.start()
        except Exception as error:  # noqa: BLE001  The program goes on without it.
            self.failure, self._profile = str(error) or type(error).__name__, None
        self.delay = thread_delay()
        self._start, self._clock = time_ns(), perf_counter()

    def stop(self) -> None:
        """Effect: the profiler has stopped; the events are read later, by `sums`."""
        self._end, self.seconds = time_ns(), perf_counter() - self._clock
        self.delay = thread_delay() - self.delay
        if self._profile is None:
            return
        try:
            self._profile.stop()
        except Exception as error:  # noqa: BLE001
            self.failure, self._profile = str(error) or type(error).__name__, None

    def sums(self) -> dict[str, Any] | None:
        """What the measured thread did in the window, as operations.py adds it up; None if the profiler saw nothing."""
        results = None if self._profile is None else self._profile.profiler.kineto_results
        if results is None:
            return None
        events = results.events()[:MOST_EVENTS]
        on_cpu = [each for each in events if each.device_type() == torch.profiler.DeviceType.CPU]
        threads = {each.start_thread_id() for each in on_cpu if each.name().startswith("cpulaunch::")}
        if not threads:
            threads = {each.start_thread_id() for each in on_cpu[:1]}
        own = [each for each in on_cpu if each.start_thread_id() in threads and not each.is_async()]
        found = add_up(map(_event, own), self._start, self._end, disturbed=self.delay > DISTURBED * self.seconds)
        found["delay"] = self.delay
        background = [each for each in on_cpu if each.start_thread_id() not in threads or each.is_async()]
        found["background_collectives"] = _union(
            [(each.start_ns(), each.end_ns()) for each in background if each.name().startswith(BACKENDS)]
        )
        found["gpu"] = _gpu([each for each in events if each.device_type() != torch.profiler.DeviceType.CPU])
        return found

    def export(self, path: str) -> None:
        """Effect: writes the trace as JSON for chrome://tracing and Perfetto. Raises: what the profiler raises."""
        if self._profile is not None:
            self._profile.export_chrome_trace(path)


def _event(each: Any) -> Event:
    return Event(
        name=each.name(),
        start=each.start_ns(),
        end=each.start_ns() + each.duration_ns(),
        flops=each.flops(),
        shapes=each.shapes(),
        types=each.dtypes(),
    )


def _gpu(events: list[Any]) -> dict[str, Any] | None:
    """Seconds in which kernels ran, and the longest kernels; None without a GPU."""
    if not events:
        return None
    spans = [(each.start_ns(), each.start_ns() + each.duration_ns()) for each in events if each.duration_ns() > 0]
    return {"seconds": _union(spans), "kernels": len(spans)}


def _union(spans: list[tuple[int, int]]) -> float:
    """Seconds that the spans cover, each moment once."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total * 1e-9
