"""How often a comparison of equal sides says that they differ, and how often a planted difference is found."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cpulaunch.measure.statistics import estimate, launch_order


def any_verdict(first: Sequence[float], other: Sequence[float], *, lower_is_better: bool) -> str:
    """The verdict of a comparison that is looked at after every round: the first that names a better side."""
    verdict = "no difference"
    for rounds in range(1, len(first) + 1):
        verdict = estimate(first[:rounds], other[:rounds], lower_is_better=lower_is_better).verdict
        if verdict in ("better", "worse"):
            return verdict
    return verdict


def simulated_verdicts(
    recorded: Sequence[float], comparisons: int, *, rounds: int, planted: float, generator: random.Random
) -> Counter[str]:
    """How many comparisons on recorded rates end with each verdict; the second side is `planted` (0.05) faster.

    Each takes a stretch of the record as it was, from a random place on, the end followed by the beginning: so it has
    the record's outliers, drifts and spells of load, in their order.
    """
    verdicts: Counter[str] = Counter()
    for seed in range(comparisons):
        start = generator.randrange(len(recorded))
        stretch = [recorded[(start + at) % len(recorded)] for at in range(2 * rounds)]
        if generator.random() < 0.5:
            stretch.reverse()
        sides: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds):
            for place, side in enumerate(launch_order(number, 2, seed=seed)):
                sides[side].append(stretch[2 * number + place] * (1 + planted * side))
        verdicts[any_verdict(*sides, lower_is_better=False)] += 1
    return verdicts


def live_verdicts(launch: Callable[[], float], comparisons: int, *, rounds: int) -> tuple[Counter[str], list[float]]:
    """The verdicts of comparisons of a program with itself, and the figures in the order of the launches."""
    verdicts: Counter[str] = Counter()
    figures: list[float] = []
    for comparison in range(comparisons):
        sides: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds):
            for side in launch_order(number, 2, seed=comparison):
                figures.append(launch())
                sides[side].append(figures[-1])
        verdicts[any_verdict(*sides, lower_is_better=False)] += 1
    return verdicts, figures


def noise_of(figures: Sequence[float]) -> dict[str, float]:
    """What a record is like: the scatter of successive ratios, its extremes, and the correlation of neighbours."""
    logs = [math.log(each) for each in figures]
    mean = math.fsum(logs) / len(logs)
    variance = math.fsum((each - mean) ** 2 for each in logs) or math.inf
    neighbours = math.fsum((a - mean) * (b - mean) for a, b in itertools.pairwise(logs))
    steps = sorted(abs(b - a) for a, b in itertools.pairwise(logs))
    return {
        "median_step": math.expm1(steps[len(steps) // 2]),
        "largest_step": math.expm1(steps[-1]),
        "correlation": neighbours / variance,
    }


def share(verdicts: Counter[str], *names: str) -> float:
    """The share of comparisons that ended with one of these verdicts."""
    return sum(verdicts[name] for name in names) / max(1, verdicts.total())


def as_json(verdicts: Counter[str]) -> dict[str, Any]:
    """The counts of all verdicts."""
    return dict(sorted(verdicts.items()))
