"""Measured windows inside a bench program, and a rendezvous of its copies before they measure."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_SECONDS = 180

Step = Callable[[], object]


def count_steps(step: Step, seconds: float) -> tuple[int, float]:
    """Number of steps until at least `seconds` have passed, and the seconds that they took."""
    start = time.perf_counter()
    count = 0
    while True:
        step()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return count, elapsed


def warm_up(step: Step, steps: int, rendezvous: Path | None, copies: int, *, seconds: float = 0.0) -> None:
    """Effect: runs at least `steps` steps and for `seconds`, until `copies` copies have arrived in `rendezvous`."""
    for _ in range(steps):
        step()
    if seconds:
        count_steps(step, seconds)
    if rendezvous is None:
        return
    (rendezvous / str(os.getpid())).touch()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(list(rendezvous.iterdir())) < copies:
        if time.monotonic() > deadline:
            sys.exit(f"error: fewer than {copies} copies arrived in {rendezvous} within {TIMEOUT_SECONDS} s")
        count_steps(step, 0.02)
