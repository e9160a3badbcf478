"""The steps that torch's profiler sees."""

from __future__ import annotations

import os
from time import perf_counter, time_ns
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cpulaunch.worker.diagnosis.counters import thread_delay
from cpulaunch.worker.diagnosis.events.kinds import BACKENDS, Event
from cpulaunch.worker.diagnosis.events.operations import add_up, backward_waits, communication
from cpulaunch.worker.diagnosis.events.spans import length

MOST_EVENTS = 400_000
"""Of a window, which ends with the last of them: a pass in Python takes microseconds for each."""

OTHER_PROFILER = "the program uses torch's profiler itself"
DISTURBED = 0.1
"""Share of the time for which the thread was ready to run and had no CPU, from which on steps are disturbed."""


class ProfilerWindow:
    """The profiler, for one window. `failure`: why it saw nothing, in words."""

    def __init__(self) -> None:
        self.failure = ""
        self.seconds = self.delay = 0.0
        self._profile: Any = None
        self._start = self._end = 0
        self._starting = self._running = False
        self._result: dict[str, Any] | None = None

    def prepare(self) -> None:
        """Effect: the profiler is initialized, which takes a second."""
        self.start()
        self.stop()
        self._profile = None

    def start(self) -> None:
        """Effect: the profiler runs, unless the program uses it too."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Not even its traces of start and stop (USDT).
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        if not self.failure and torch.autograd._profiler_enabled():
            self.failure = OTHER_PROFILER
        if not self.failure:
            self._starting = True
            try:
                self._profile = profile(activities=activities, record_shapes=True, with_flops=True)
                self._profile.start()
                self._running = True
            except Exception as error:  # noqa: BLE001  The program goes on without it.
                self.failure, self._profile = str(error) or type(error).__name__, None
            finally:
                self._starting = False
        self.delay = thread_delay()
        self._start, self._clock = time_ns(), perf_counter()

    def abandon(self) -> None:
        """Effect: in a process that was forked while the profiler ran, this thread records nothing for it."""
        if self._running:
            self._running = False
            torch.autograd._enable_record_function(False)

    def give_way(self) -> None:
        """Effect: a profiler that is about to start is alone from now on, unless it is the window's own."""
        if self._starting:
            return
        self.failure = OTHER_PROFILER
        if self._running:
            self._stop_profiler()
        self._profile = None

    def next(self) -> ProfilerWindow:
        """Another window, which knows whether the program has a profiler of its own."""
        found = ProfilerWindow()
        found.failure = self.failure if self.failure == OTHER_PROFILER else ""
        return found

    def stop(self) -> None:
        """Effect: the profiler has stopped; the events are read later, by `sums`."""
        self._end, self.seconds = time_ns(), perf_counter() - self._clock
        self.delay = thread_delay() - self.delay
        self._stop_profiler()

    def _stop_profiler(self) -> None:
        if not self._running:
            return
        self._running = False
        try:
            self._profile.stop()
        except Exception as error:  # noqa: BLE001
            self.failure, self._profile = str(error) or type(error).__name__, None

    def sums(self) -> dict[str, Any] | None:
        """What the measured thread did in the window, as operations.py adds it up; None if the profiler saw nothing."""
        results = None if self._profile is None else self._profile.profiler.kineto_results
        if results is None:
            return None
        events = results.events()
        end = self._end
        if len(events) > MOST_EVENTS:
            events = sorted(events, key=lambda each: each.start_ns())[:MOST_EVENTS]
            end = min(end, events[-1].start_ns())
            events = [each for each in events if each.start_ns() < end]
        on_cpu = [each for each in events if each.device_type() == torch.profiler.DeviceType.CPU]
        threads = {each.start_thread_id() for each in on_cpu if each.name().startswith("cpulaunch::")}
        if not threads:
            threads = {each.start_thread_id() for each in on_cpu[:1]}
        own = [_event(each, end) for each in on_cpu if each.start_thread_id() in threads and not each.is_async()]
        found = add_up(own, self._start, end, disturbed=self.delay > DISTURBED * self.seconds)
        found["part"] = (end - self._start) / max(1, self._end - self._start)
        found["delay"] = self.delay * found["part"]
        background = [each for each in on_cpu if each.start_thread_id() not in threads or each.is_async()]
        collectives = [(each.start_ns(), each.end_ns()) for each in background if each.name().startswith(BACKENDS)]
        found["backward_waits"] = backward_waits(own, collectives)
        found["communication"] = communication(own, collectives, (self._start, end), found["backward_waits"])
        found["gpu"] = _gpu([each for each in events if each.device_type() != torch.profiler.DeviceType.CPU])
        return found

    def export(self, path: str) -> None:
        """Effect: writes the trace as JSON for chrome://tracing and Perfetto. Raises: what the profiler raises."""
        if self._profile is not None:
            self._profile.export_chrome_trace(path)


def _event(each: Any, end: int) -> Event:
    """The event, until the end of what is looked at."""
    return Event(
        name=each.name(),
        start=each.start_ns(),
        end=min(end, each.start_ns() + each.duration_ns()),
        flops=each.flops(),
        shapes=each.shapes(),
        types=each.dtypes(),
    )


def _gpu(events: list[Any]) -> dict[str, Any] | None:
    """Seconds in which kernels ran, and the longest kernels; None without a GPU."""
    if not events:
        return None
    spans = [(each.start_ns(), each.start_ns() + each.duration_ns()) for each in events if each.duration_ns() > 0]
    return {"seconds": length(spans), "kernels": len(spans)}
