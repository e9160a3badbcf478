"""What a timed program consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Unit = Literal["samples/s", "tokens/s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is ready to run.

    `step(number)` runs a step and returns its result; steps with the same number modulo `cycle` have the same input.
    A step processes `amount` samples or tokens. `training`: a step changes the weights, so no step can be repeated.
    """

    step: Callable[[int], object]
    amount: int
    unit: Unit = "samples/s"
    cycle: int = 1
    training: bool = False


Build = Callable[[], Program]
"""Builds a program from torch's current random state."""
