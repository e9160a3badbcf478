"""One process's measurement, from its first step to the file with its figures."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from statistics import median
from time import perf_counter, thread_time

import torch

from cpulaunch.records.torch_settings import (
    FAILED,
    FETCHES,
    FIGURES,
    IN_THREADS,
    LOADED,
    STEPPING,
    TRACES,
    figures_name,
)
from cpulaunch.system.files.writing import replace
from cpulaunch.system.process_snapshot import snapshot
from cpulaunch.worker.diagnosis import phases as phase_names
from cpulaunch.worker.diagnosis.activity import Activity
from cpulaunch.worker.diagnosis.counters import busy_threads, growth, read_counters, thread_delay
from cpulaunch.worker.diagnosis.marker import StepMarker
from cpulaunch.worker.diagnosis.phases import Phases
from cpulaunch.worker.diagnosis.precision_test import slowdowns
from cpulaunch.worker.diagnosis.sampler import SAMPLER, LineSampler
from cpulaunch.worker.diagnosis.thread_choice import MOST_THREADS, ThreadChoice
from cpulaunch.worker.diagnosis.window import DISTURBED, ProfilerWindow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from cpulaunch.records.torch_settings import DiagnosisRequest

MEASURED = (phase_names.BEFORE, phase_names.AFTER)
FETCH_PAUSE_SECONDS = 0.5
"""Between two writings of a DataLoader worker's figures."""
ALWAYS_COUNTED, COUNTING_PART = 20, 100
"""So many steps of a phase read the counters at their end; later ones if 100 times as long has passed as it takes."""
EXIT_PRIORITY = 1000
"""Among what multiprocessing runs when a process ends: before whatever may take long."""
FOREIGN: type = getattr(threading, "_DummyThread", type(None))
"""The class of threads that others have started, such as torch, and in which some code of Python has run."""
NOTHING = {"seconds": 0.0, "delay": 0.0}
"""What a thread had used that did not exist."""
LOW_SHARE = 0.05
"""Of the window, in products of a low precision: from this share on, these are timed against fp32."""


class Session:
    """Measures the steps of this process. Its methods are called by the hooks."""

    def __init__(self, request: DiagnosisRequest, index: int) -> None:
        self.request = request
        self.index = index
        self.activity = Activity()
        self._window = ProfilerWindow()
        self.reset()
        write_at_end(self)

    def reset(self) -> None:
        """Effect: everything begins anew, as in a forked process."""
        self.activity.reset()
        self._pid = os.getpid()
        self._marker = StepMarker()
        self._choice = ThreadChoice()
        self._phases = Phases(self.request)
        self._window.abandon()
        self._window = ProfilerWindow()
        self._measuring_since = time.time()
        self._sampler = LineSampler(self.activity)
        self._last: float | None = None
        self._busy = self._written = False
        self._steps: list[float] = []
        self._seen = 0
        self._sums: dict[str, float] = {}
        self._started: dict[str, float] = {}
        self._counted: dict[str, float] = {}
        self._counted_steps = 0
        self._counted_at = self._counting_seconds = self._counting_cpu = self._counting_delay = 0.0
        self._threads: list[dict[str, Any]] = []
        self._stepping: set[int] = set()
        self._fetches = {"seconds": 0.0, "cpu": 0.0, "collate": 0.0, "count": 0.0, "wall": 0.0}
        self._fetches_begun: float | None = None
        self._fetches_delay = 0.0
        self._fetches_written = 0.0
        self._told: set[str] = set()

    def ended(self, kind: str, key: object, seconds: float = 0.0) -> None:
        """Effect: where a step ends, its time counts, and the next phase may begin. `seconds`: of the call."""
        if self._busy or self._phases.name == phase_names.DONE or torch.utils.data.get_worker_info() is not None:
            return
        try:
            self._call_ended(kind, key, seconds, perf_counter())
        except Exception as error:  # noqa: BLE001  The program goes on without the measurement.
            self._give_up(error)

    def _call_ended(self, kind: str, key: object, seconds: float, now: float) -> None:
        if not self.activity.is_measured_thread() and not self._is_taken_over(kind, now):
            return
        if self.activity.now == "data" and kind != "loader":  # What prepares samples makes no steps.
            return
        self._choice.heard(now)
        changes = self._marker.changes
        if not self._marker.ends_step(kind, key, seconds):
            return
        with self._alone():
            self._end_step(now, is_new=self._marker.changes != changes)
            if self._phases.name == phase_names.WARM_UP and kind != "loader":
                self._sampler.exclude(sys._getframe())
        self._last = perf_counter()

    def _is_taken_over(self, kind: str, now: float) -> bool:
        """Whether this thread is the measured one from now on. Effect: then measuring begins anew."""
        if kind != "loader" and len(self._stepping) < MOST_THREADS:  # A reader of samples makes no steps.
            self._stepping.add(threading.get_native_id())
        if kind not in ("module", "optimizer"):
            return False
        self._tell(IN_THREADS)
        is_stoppable = self._phases.name != phase_names.PROFILED  # By the thread that has started the profiler.
        thread, measured = threading.get_native_id(), self._marker.kind
        if not is_stoppable or not self._choice.takes_over(thread, kind, measured=measured, now=now):
            return False
        with self._alone():
            self.activity.measure_this_thread()
            self._marker = StepMarker()
            self._restart()
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Effect: calls that end meanwhile, in other threads or in what runs here in between, do not count."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _give_up(self, error: Exception) -> None:
        """Effect: nothing is measured any more, and the command that watches the folder knows why."""
        self._phases.name = phase_names.DONE
        self._written = True
        self.activity.record = None
        self._sampler.stop()
        with suppress(Exception):
            self._window.stop()
        text = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            replace(os.path.join(self.request.folder, f"{FAILED}{os.getpid()}"), text.encode(errors="replace"))

    def before_profiler(self) -> None:
        """Effect: a profiler of the program has no other beside it, from now on."""
        self._window.give_way()

    def _end_step(self, now: float, *, is_new: bool) -> None:
        self._seen += 1
        if is_new or self._last is None:
            if self._last is None:
                self._window.prepare()
            self._tell(STEPPING)
            self._restart()
        else:
            seconds = now - self._last
            is_first = not self._phases.steps
            name = self._phases.name
            is_over = self._phases.add(seconds)
            if name in MEASURED and not is_first:
                self._steps.append(seconds)
            if is_over:
                self._change(name)
            elif name in MEASURED and is_first:
                self._begin_counting()
            elif name in MEASURED and self._is_counting_due(now):
                self._count()

    def _is_counting_due(self, now: float) -> bool:
        has_few = len(self._phases.steps) <= ALWAYS_COUNTED
        return has_few or now - self._counted_at >= COUNTING_PART * self._counting_seconds

    def _restart(self) -> None:
        """Effect: nothing has been measured yet. What was measured before had other steps."""
        if self._phases.name == phase_names.PROFILED:
            self._window.stop()
            self._window = self._window.next()
        self._phases.restart()
        self._sampler.pause()
        self._sampler.restart()
        self._steps, self._sums, self._started, self._threads = [], {}, {}, []
        self.activity.record = None

    def _begin_counting(self) -> None:
        """Effect: counters count from here on. The first step of a phase, which other ranks may delay, is left out."""
        if not self._threads:
            self._threads, self._measuring_since = busy_threads(), time.time()
        self._count()
        self._started = self._counted
        self._sampler.start()

    def _count(self) -> None:
        """Effect: the counters are known at the end of this step, if the program makes no other one."""
        begun, cpu, delay = perf_counter(), thread_time(), thread_delay()
        self._counted, self._counted_steps = read_counters() | self.activity.totals, len(self._steps)
        self._counted["thread_cpu"] = cpu - self._counting_cpu
        self._counted["thread_delay"] = delay - self._counting_delay
        self._counted_at = perf_counter()
        self._counting_seconds = self._counted_at - begun
        self._counting_cpu += thread_time() - cpu
        self._counting_delay += thread_delay() - delay

    def _end_counting(self) -> None:
        self._sampler.pause()
        if self._started:
            for name, value in growth(self._started, self._counted).items():
                self._sums[name] = self._sums.get(name, 0.0) + value
        self._started = {}

    def _change(self, ended: str) -> None:
        """Effect: the phase after the one that ended begins."""
        if ended in MEASURED:
            self._count()
            self._end_counting()
        if ended == phase_names.BEFORE:
            self._phases.is_disturbed = self._sums.get("thread_delay", 0.0) > DISTURBED * sum(self._steps)
            self._window = self._window.next()
            self._window.start()
            self.activity.record = torch._C._profiler._RecordFunctionFast
        elif ended == phase_names.PROFILED:
            self.activity.record = None
            self._window.stop()
        elif ended == phase_names.AFTER:
            self._finish()

    def _finish(self) -> None:
        self._sampler.stop()
        self._write(self._figures())

    def _figures(self) -> dict[str, Any]:
        """All that was measured. Time and threads are read first: the rest takes time in which no steps are made."""
        ended, busy = time.time(), _busy_between(self._threads, busy_threads(), self._beside_steps())
        window = self._window.sums()
        profiled = next((each for each in self._phases.finished if each.name == phase_names.PROFILED), None)
        rank, world = _place()
        return {
            "schema": 1,
            "pid": os.getpid(),
            "index": self.index,
            "rank": rank,
            "world_size": world,
            "participants": _participants(),
            "step": self._marker.kind,
            "steps": len(self._steps),
            "seen_steps": self._seen,
            "started": self._measuring_since,
            "ended": ended,
            "seconds": sum(self._steps),
            "median_seconds": median(self._steps) if self._steps else 0.0,
            "profiled_steps": 0 if profiled is None else len(profiled.steps),
            "profiled_seconds": 0.0 if profiled is None else sum(profiled.steps),
            "sums": self._sums,
            "window": window,
            "window_failure": self._window.failure,
            "slowdowns": slowdowns() if _uses_low_precision(window) else {},
            "threads": torch.get_num_threads(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "busy_threads": busy,
            "loader_workers": self.activity.loader_workers,
            "prefetched": self.activity.prefetched,
            "batch_bytes": self.activity.batch_bytes,
            "fetches": dict(self._fetches),
            "where": self._sampler.report(),
            "snapshot": snapshot(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }

    def _beside_steps(self) -> set[int]:
        """The ids of the program's own Python threads that call no modules, such as readers of samples."""
        own = [each for each in threading.enumerate() if each.name != SAMPLER and type(each) is not FOREIGN]
        found = {each.native_id for each in own if each.native_id is not None}
        return found - self._stepping - {self.activity.native_thread}

    def _write(self, figures: dict[str, Any]) -> None:
        self._written = True
        if self.request.trace:
            with suppress(Exception):  # The program goes on without the trace.
                self._window.export(os.path.join(self.request.folder, f"{TRACES}{os.getpid()}.json"))
        self._replace(FIGURES, figures)

    def _replace(self, start: str, figures: dict[str, Any]) -> None:
        """Effect: this process's file whose name starts so holds the figures; it stays as it was on a full disk."""
        name = figures_name(start, self.index, os.getpid())
        with suppress(OSError):
            replace(os.path.join(self.request.folder, name), json.dumps(figures).encode())

    def loaded(self) -> None:
        """Effect: the command that watches the folder knows that this process has loaded torch."""
        self._tell(LOADED)

    def _tell(self, state: str) -> None:
        """Effect: the command that watches the folder knows how far this process has come."""
        if state not in self._told:
            self._told.add(state)
            with suppress(OSError):
                replace(os.path.join(self.request.folder, f"{state}{os.getpid()}"), b"")

    def fetched(self, seconds: float, cpu: float, collate: float) -> None:
        """Effect: a DataLoader's fetch in this process counts; a worker writes its sums from time to time."""
        sums, now = self._fetches, perf_counter()
        if self._fetches_begun is None:
            self._fetches_begun, self._fetches_delay = now - seconds, thread_delay()
        sums["wall"] = now - self._fetches_begun
        sums["seconds"] += seconds
        sums["cpu"] += cpu
        sums["collate"] += collate
        sums["count"] += 1
        if torch.utils.data.get_worker_info() is None:
            return
        if now - self._fetches_written >= FETCH_PAUSE_SECONDS:
            self._fetches_written = now
            sums["delay"] = thread_delay() - self._fetches_delay
            self._replace(FETCHES, sums)

    def at_exit(self) -> None:
        """Effect: a program that ends early leaves figures of the steps there were, not of what it did after them."""
        if self._pid != os.getpid() or self._written or not self._marker.kind:
            return
        if self._phases.name in MEASURED and self._started:
            del self._steps[self._counted_steps :]
            self._end_counting()
        elif self._phases.name == phase_names.PROFILED:
            self._window.stop()
        self._sampler.stop()
        with suppress(Exception):  # The exit code stays as it is.
            self._write(self._figures())


def write_at_end(session: Session) -> None:
    """Effect: the session leaves its figures when this process ends, or one of multiprocessing's that it forks.

    The latter end by os._exit, and forget what their parent had registered, before functions for after a fork run.
    """
    from multiprocessing import util

    def register(session: Session) -> None:
        util.Finalize(None, session.at_exit, exitpriority=EXIT_PRIORITY)

    atexit.register(session.at_exit)
    register(session)
    util.register_after_fork(session, register)


def _uses_low_precision(window: dict[str, Any] | None) -> bool:
    if window is None or not window["seconds"]:
        return False
    return bool(window["kinds"].get("low products", 0.0) >= LOW_SHARE * window["seconds"])


def _busy_between(before: list[dict[str, Any]], after: list[dict[str, Any]], beside: set[int]) -> list[dict[str, Any]]:
    """What each thread used, and waited for, between two readings; idle threads are left out. `beside`: the steps."""
    started = {each["id"]: each for each in before}
    found = [
        {
            "seconds": each["seconds"] - started.get(each["id"], NOTHING)["seconds"],
            "delay": each["delay"] - started.get(each["id"], NOTHING)["delay"],
            "cpus": each["cpus"],
            "is_beside": each["id"] in beside,
        }
        for each in after
    ]
    return [each for each in found if each["seconds"] > 0.001][:256]


def _place() -> tuple[int | None, int]:
    """The rank, None outside a job, and the number of ranks."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None, 1


def _participants() -> int:
    """How many processes on this host make the steps of a job together; 1 outside a job."""
    _, world = _place()
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("CPULAUNCH_INSTANCES") or ""
    return int(local) if local.isdigit() else world
