"""Measured windows inside a bench program, and how copies of it meet before theirs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 180

Step = Callable[[], object]


def count_steps(step: Step, seconds: float) -> tuple[int, float]:
    """Steps run until `seconds` have passed, and the seconds they took."""
    start = time.perf_counter()
    count = 0
    while True:
        step()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return count, elapsed


def warm_up(step: Step, steps: int, rendezvous: Path | None, copies: int) -> None:
    """Effect: runs at least `steps` steps, and goes on until `copies` copies have met in `rendezvous`."""
    for _ in range(steps):
        step()
    if rendezvous is None:
        return
    (rendezvous / str(os.getpid())).touch()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(rendezvous.iterdir())) < copies:
        if time.monotonic() > deadline:
            sys.exit(f"error: fewer than {copies} copies came to {rendezvous} within {PATIENCE_SECONDS} s")
        count_steps(step, 0.02)
