"""Which line of the program the measured thread is at, fifty times a second."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections import Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

    from cpulaunch.worker.diagnosis.activity import Activity

SAMPLER = "cpulaunch-sampler"
"""The name of its thread."""
INTERVAL_SECONDS = 0.02
MOST_PLACES = 1000
REPORTED = 8
GENERATOR = 0x20
"""Flag of the code of a generator function. Source: Python, inspect.CO_GENERATOR."""
DEEP = 200
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of paths of installed packages, of other Pythons and of the user too."""


class LineSampler:
    """Counts, by what the thread does: `data`, `collective`, `backward` (the hooks'), `getitem`, `generator` or "".

    The last three are those of the program's own code: inside a method __getitem__, inside a generator or a method
    __next__, elsewhere. A generator in which steps end makes no samples: it trains, or streams what a model makes.
    """

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._counts: Counter[tuple[str, str]] = Counter()
        self._stop = threading.Event()
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name=SAMPLER, daemon=True)
        self._foreign = _library_folders()
        self._known: dict[str, bool] = {}
        self._stepping: set[CodeType] = set()

    def start(self) -> None:
        """Effect: samples from now on."""
        self._running.set()
        if not self._thread.is_alive():
            self._thread.start()

    def pause(self) -> None:
        """Effect: takes no samples until the next start."""
        self._running.clear()

    def stop(self) -> None:
        """Effect: ends the thread."""
        self._stop.set()
        self._running.set()

    def restart(self) -> None:
        """Effect: nothing has been seen yet."""
        self._counts.clear()
        self._stepping = set()

    def exclude(self, innermost: FrameType | None) -> None:
        """Effect: the generators of these frames do not count as making samples: a step ends in them."""
        frame = innermost
        for _ in range(DEEP):
            if frame is None:
                break
            if _yields(frame.f_code):
                self._stepping.add(frame.f_code)
            frame = frame.f_back

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self._running.wait()  # A thread that wakes up takes the interpreter's lock from the measured one.
            frame = sys._current_frames().get(self._activity.thread) if self._is_alive() else None
            if frame is not None and len(self._counts) < MOST_PLACES and not self._stop.is_set():
                self._counts[self._place(frame)] += 1
            del frame  # Until the next look it would keep what the frame's function has been called with.

    def _is_alive(self) -> bool:
        """Whether the measured thread has not ended: its identifier may then be that of another one."""
        return os.path.exists(f"/proc/self/task/{self._activity.native_thread}")

    def _place(self, innermost: FrameType) -> tuple[str, str]:
        doing, place = self._activity.now, ""
        frame: FrameType | None = innermost
        for _ in range(DEEP):
            if frame is None:
                break
            code = frame.f_code
            if self._is_program(code.co_filename):
                place = place or f"{code.co_filename}:{frame.f_lineno}"
                if not doing and code.co_name == "__getitem__":
                    doing = "getitem"
                elif not doing and self._makes_samples(code):
                    doing = "generator"
            frame = frame.f_back
        return doing, place

    def _makes_samples(self, code: CodeType) -> bool:
        return _yields(code) and code.co_name != "<genexpr>" and code not in self._stepping

    def _is_program(self, file: str) -> bool:
        known = self._known.get(file)
        if known is None:
            known = not file.startswith(("<", *self._foreign)) and not any(name in file for name in PACKAGES)
            self._known[file] = known
        return known

    def report(self) -> dict[str, Any]:
        """{"samples": count, "doing": {what: count}, "places": [[what, "file:line", count], …] most first}."""
        doing: Counter[str] = Counter()
        kept: Counter[str] = Counter()
        chosen: list[tuple[str, str, int]] = []
        for (what, _), count in self._counts.items():
            doing[what] += count
        for (what, place), count in self._counts.most_common():
            kept[what] += bool(place)
            if place and kept[what] <= REPORTED:
                chosen.append((what, place, count))
        return {"samples": doing.total(), "doing": dict(doing), "places": chosen}


def _yields(code: CodeType) -> bool:
    """Whether it is the code of a generator or of an iterator's method."""
    return bool(code.co_flags & GENERATOR) or code.co_name == "__next__"


def _library_folders() -> tuple[str, ...]:
    """Folders of code that is not the program's: the standard library, installed packages, torch, and this package."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_path(name) for name in names}
    found |= {os.path.realpath(path) for path in found if path}
    torch = sys.modules.get("torch")
    found |= {os.path.dirname(path) for path in [getattr(torch, "__file__", None)] if path}
    own = __file__
    for _ in range(3):
        own = os.path.dirname(own)
    return tuple(f"{path}{os.sep}" for path in (*found, own) if path)
