"""One trial: a few samples of a configuration, as long as it may be the best, and why it cannot win."""

from __future__ import annotations

import math
from statistics import median

from cpulaunch.measure.tuning.numerics import wrong_outputs
from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from cpulaunch.measure.samples import Sample
    from cpulaunch.measure.tuning.numerics import Outputs

LEAST_NOISE = 0.01
"""Launches of one program are never taken to differ by less, as a logarithm of the ratio."""
FIRST_NOISE = 0.05
"""The noise before two samples of the default are known."""
MARGIN = 2.0
"""A configuration is measured once if it is slower than the best by so many times the noise."""


@record
class Guard:
    """What outputs must be: those of plain Python, `reference`, within `max_error`; None: but for rounding.

    `output`: the content of the file that the program writes, as outputs; it is called after each launch.
    """

    reference: Outputs = field(default_factory=dict)
    max_error: float | None = None
    output: Callable[[], Outputs] | None = None

    def outputs(self, sample: Sample) -> list[Outputs]:
        """The outputs of each worker of a launch."""
        extra = {} if self.output is None else dict(self.output())
        workers = [] if sample.report is None else sample.report.get("workers") or []
        found = [dict(worker.get("checksums") or {}) for worker in workers] or [dict(sample.checksums)]
        return [{**each, **extra} for each in found]

    def failure(self, sample: Sample) -> str | None:
        """Why the launch cannot win, in a sentence; None if it can."""
        if sample.failure is not None or sample.value is None:
            return sample.failure or "it has no figure"
        if not self.reference:
            return None
        wrong = (wrong_outputs(self.reference, each, max_error=self.max_error) for each in self.outputs(sample))
        return next((text for text in wrong if text is not None), None)


class Baseline:
    """The speed of the default over time: each trial is compared with what it was at that time."""

    def __init__(self) -> None:
        self.speeds: list[float] = []
        self._since: list[float] = []

    def add(self, speed: float) -> None:
        """Effect: the default has this speed now."""
        self.speeds.append(speed)

    @property
    def now(self) -> float:
        """The median of the last three speeds."""
        return median(self.speeds[-3:])

    @property
    def noise(self) -> float:
        """By how much two launches of the default differ, as a logarithm of the ratio: a standard deviation."""
        if len(self.speeds) < 2:
            return FIRST_NOISE
        middle = median(self.speeds)
        return max(LEAST_NOISE, 1.4826 * median(abs(math.log(each / middle)) for each in self.speeds))


@record
class Measured:
    """The result of a trial. `ratio`: how many times as fast as the default; None if it failed."""

    ratio: float | None
    failure: str | None
    facts: Mapping[str, Any]
    pruned: bool = False


def speed(sample: Sample, *, lower_is_better: bool) -> float:
    """The figure of a sample as a speed: larger is better."""
    assert sample.value is not None
    return 1 / sample.value if lower_is_better else sample.value


def measure_trial(
    take: Callable[[], Sample],
    guard: Guard,
    baseline: Baseline,
    *,
    best: float,
    lower_is_better: bool,
    repeats: int,
) -> Measured:
    """The result of a configuration that `take` launches: once if it is clearly slower than `best`, else `repeats`."""
    ratios: list[float] = []
    values: list[float] = []
    seconds = 0.0
    floor = math.log(best) - MARGIN * baseline.noise
    for _ in range(repeats):
        sample = take()
        seconds += sample.seconds
        if (failure := guard.failure(sample)) is not None:
            return Measured(ratio=None, failure=failure, facts=_facts(values, seconds))
        assert sample.value is not None
        values.append(sample.value)
        ratios.append(speed(sample, lower_is_better=lower_is_better) / baseline.now)
        if math.log(median(ratios)) < floor:
            break
    pruned = len(ratios) < repeats
    return Measured(ratio=median(ratios), failure=None, facts=_facts(values, seconds), pruned=pruned)


def _facts(values: Sequence[float], seconds: float) -> dict[str, Any]:
    return {"values": list(values), "seconds": round(seconds, 3)}
