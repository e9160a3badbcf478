"""One trial: a few samples of a configuration, as long as it may be the best, and why it cannot win."""

from __future__ import annotations

import math
from statistics import median

from cpulaunch.measure.disturbance import disturbance_reasons
from cpulaunch.measure.tuning.outputs.numerics import wrong_outputs
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from cpulaunch.measure.samples import Sample
    from cpulaunch.measure.tuning.outputs.numerics import Outputs

LEAST_NOISE = 0.01
"""Launches of one program are never taken to differ by less, as a logarithm of the ratio."""
FIRST_NOISE = 0.05
"""The noise before two samples of the default are known."""
MARGIN = 2.0
"""A configuration is measured once if it is slower than the best by so many times the noise."""
NEAREST = 3
"""Samples of the default before a trial, and so many after it, whose median it is compared with: one may be wrong."""


@record
class Guard:
    """What outputs must be: those of `references`, within `max_error`; None: but for rounding.

    `references`: plain Python's alone, which all workers must have; with `by_rank` those of each rank of a job: only
    rank 0 may give some, or each those of its share of the data. `output`: the content of the file that the program
    writes, as outputs; None if it wrote none. It is called after each launch.
    """

    references: Sequence[Outputs] = ()
    by_rank: bool = False
    max_error: float | None = None
    output: Callable[[], Outputs | None] | None = None

    def outputs(self, sample: Sample) -> list[Outputs] | None:
        """The outputs of each worker of a launch; None if the file was not written."""
        written = {} if self.output is None else self.output()
        if written is None:
            return None
        extra = dict(written)
        workers = [] if sample.report is None else sample.report.get("workers") or []
        found = [dict(worker.get("checksums") or {}) for worker in workers] or [dict(sample.checksums)]
        return [{**each, **extra} for each in found]

    def failure(self, sample: Sample) -> str | None:
        """Why the launch cannot win, in a sentence; None if it can."""
        if sample.failure is not None or sample.value is None:
            return sample.failure or "it has no figure"
        if not any(self.references):
            return None
        outputs = self.outputs(sample)
        return "it did not write the file of --output" if outputs is None else self.wrong(outputs)

    def wrong(self, outputs: Sequence[Outputs]) -> str | None:
        """What is wrong with the outputs of a launch's workers, in a sentence; None if nothing is."""
        references = self.references if self.by_rank else [*self.references] * len(outputs)
        for rank, (reference, found) in enumerate(zip(references, outputs, strict=False)):
            text = wrong_outputs(reference, found, max_error=self.max_error)
            if text is not None:
                return f"rank {rank}: {text}" if self.by_rank else text
        return None


def nearest_speed(before: Sequence[float], after: Sequence[float]) -> float:
    """The default's speed at a moment, from its speeds before and after it, of which there is one at least."""
    return median([*before[-NEAREST:], *after[:NEAREST]])


class Baseline:
    """The speed of the default over time: each trial is compared with what it was at that time."""

    def __init__(self) -> None:
        self.speeds: list[float] = []

    def add(self, speed: float) -> None:
        """Effect: the default has this speed now."""
        self.speeds.append(speed)

    @property
    def now(self) -> float:
        """The median of the last speeds."""
        return nearest_speed(self.speeds, ())

    @property
    def spread(self) -> float:
        """The logarithm of the ratio of the largest speed to the smallest."""
        return math.log(max(self.speeds) / min(self.speeds))

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


def is_disturbed(sample: Sample) -> bool:
    """Whether something else happened on the machine meanwhile."""
    return bool(disturbance_reasons(sample.disturbance, seconds=sample.seconds))


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
    """The result of a configuration that `take` launches: once if it is clearly slower than `best`, else `repeats`.

    A sample that was disturbed needs another one that is as slow.
    """
    speeds: list[float] = []
    samples: list[Sample] = []
    floor = math.log(best) - MARGIN * baseline.noise
    for _ in range(repeats):
        sample = take()
        samples.append(sample)
        if (failure := guard.failure(sample)) is not None:
            return Measured(ratio=None, failure=failure, facts=_facts(samples))
        speeds.append(speed(sample, lower_is_better=lower_is_better))
        is_slow = math.log(max(speeds) / baseline.now) < floor
        if is_slow and (len(speeds) > 1 or not is_disturbed(sample)):
            break
    facts = _facts(samples) | {"speed": median(speeds)}
    return Measured(ratio=median(speeds) / baseline.now, failure=None, facts=facts, pruned=len(speeds) < repeats)


def _facts(samples: Sequence[Sample]) -> dict[str, Any]:
    """What is kept of a trial's launches: of all metrics those of the last launch."""
    reasons = [disturbance_reasons(each.disturbance, seconds=each.seconds) for each in samples]
    return {
        "values": [each.value for each in samples if each.value is not None],
        "seconds": round(sum(each.seconds for each in samples), 3),
        "metrics": dict(samples[-1].metrics),
        "disturbed": list(dict.fromkeys(text for each in reasons for text in each)),
    }
