"""Whether the processes of a program have been measured, by the files that they write meanwhile."""

from __future__ import annotations

import os
import time

from cpulaunch.measure.diagnosis.folder import FiguresReader, failed_processes, stepping_processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_WAIT_SECONDS = 2.0
"""For processes that still make steps, once as many as a job has are measured."""
LOOK_SHARE = 0.05
"""The share of the time that may be spent on looking: what the program prints asks for a look each time."""


class Measurement:
    """Watches a folder. No process ends itself: others may wait for what it does."""

    def __init__(
        self,
        folder: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_alive: Callable[[int], bool] | None = None,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._is_alive = is_alive or _is_alive
        self._reader = FiguresReader(folder)
        self._next_look = float("-inf")
        self._begun: float | None = None
        self._enough: float | None = None
        self._unmeasured: frozenset[int] = frozenset()

    def is_complete(self) -> bool:
        """Whether the program is not needed any more.

        As many processes as a job has on this host have been measured, and so have all others that make steps and
        still run; for these it waits as long again as the first ones took. Raises: LaunchError if the folder is gone.
        """
        now = self._clock()
        if now >= self._next_look:
            self._look(now)
            looked = self._clock()
            self._next_look = looked + min((looked - now) / LOOK_SHARE, LEAST_WAIT_SECONDS)
        if self._enough is None:
            return False
        begun = now if self._begun is None else self._begun
        patience = max(LEAST_WAIT_SECONDS, self._enough - begun)
        return now - self._enough >= patience or not any(map(self._is_alive, self._unmeasured))

    def _look(self, now: float) -> None:
        measured = [each for each in self._reader.read() if each.steps > 0]
        failed = failed_processes(self._folder)
        stepping = stepping_processes(self._folder) - failed
        if stepping and self._begun is None:
            self._begun = now
        self._unmeasured = stepping - {each.pid for each in measured}
        wanted = max((each.participants for each in measured), default=1)
        if self._enough is None and len(measured) + len(failed) >= wanted:
            self._enough = now


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
