"""Interleaved rounds and the statistics of their samples.

On a shared machine absolute numbers drift by tens of per cent within minutes. Every round therefore measures each
variant once and starts with a different one; variants are compared within a round before the median is taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, minimum and maximum of samples, in their unit."""

    median: float
    smallest: float
    largest: float

    def to_json(self) -> dict[str, float]:
        return {"median": self.median, "min": self.smallest, "max": self.largest}


def spread(samples: Sequence[float]) -> Spread:
    """Median, minimum and maximum of the samples. Raises: ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    return Spread(median=statistics.median(samples), smallest=min(samples), largest=max(samples))


def median_interval(samples: Sequence[float]) -> Spread:
    """The median, and the limits between which that of all possible samples lies with 95 % confidence.

    Source: order statistics of independent samples, binomial distribution. Fewer than six samples give their minimum
    and maximum, whose confidence is lower.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples")
    outside = _outside(len(ordered))
    first, last = ordered[outside], ordered[-1 - outside]
    return Spread(median=statistics.median(ordered), smallest=first, largest=last)


def _outside(count: int) -> int:
    """How many of so many sorted samples may be left out at each end of an interval with 95 % confidence."""
    outside, cases, ways = 0, 1, 1
    while 2 * cases <= 0.05 * 2**count:  # The next sample may be left out, too.
        outside += 1
        ways = ways * (count - outside + 1) // outside
        cases += ways
    return max(0, outside - 1)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Geometric mean of the ratios. Raises: ValueError without ratios or with one that is not positive."""
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"a geometric mean needs positive ratios: {list(ratios)}")
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def paired_ratios(samples: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Sample divided by reference, for each round."""
    return [sample / base for sample, base in zip(samples, reference, strict=True)]


def paired_differences(samples: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Sample minus reference, for each round."""
    return [sample - base for sample, base in zip(samples, reference, strict=True)]


def rotated(items: Sequence[str], by: int) -> Iterator[str]:
    """The items, rotated left by `by` places; with the round number as `by`, no variant always runs first."""
    return (items[(by + place) % len(items)] for place in range(len(items)))


def measure_rounds(variants: Sequence[str], measure: Callable[[str], float], *, rounds: int) -> dict[str, list[float]]:
    """Variant -> one sample for each round, measured in interleaved order."""
    samples: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in rotated(variants, number):
            samples[variant].append(measure(variant))
    return samples
