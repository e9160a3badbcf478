"""A model of few trials: how much each setting, and each pair of strong ones, changes the speed, with its uncertainty.

Bayesian linear regression of the ratio's logarithm on the settings that differ from the default. After a dozen trials
it says more than TPE, which learns from the densities of good and bad trials. Source: Bishop, Pattern Recognition and
Machine Learning (2006), section 3.3.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from statistics import fmean, pvariance

from cpulaunch.measure.tuning.knowledge import neighbours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any, TypeAlias

    from cpulaunch.measure.tuning.space import Configuration, Dimension
    from cpulaunch.measure.tuning.study import TuningTrial

    Feature: TypeAlias = "tuple[tuple[str, Any], ...]"

STRONG = (
    "weights",
    "graph",
    "precision",
    "threads",
    "instances",
    "cores_per_instance",
    "smt",
    "dist_backend",
    "nproc_per_node",
)
"""Settings whose effects are often a half or more; those of others are mostly a few percent."""
STRONG_EFFECT, WEAK_EFFECT, PAIR_EFFECT = 0.4, 0.06, 0.15
"""Standard deviations of the effects before any trial, as logarithms of ratios."""
FAILED = -1.0
"""The logarithm that a failed trial counts as."""
NOISE = 0.03
"""Standard deviation of a trial's logarithm that is no effect of its settings."""
FEWEST_TRIALS = 4
"""Measured trials before which nothing is said of the settings' importance."""
CLEAR = 3.0
"""Standard deviations from which on an effect is no noise: noise alone names a setting of ten in 1 of 50 searches."""
MAX_COMBINED = 600
CURIOSITY = 1.5
"""Standard deviations that uncertainty is worth: the upper confidence bound is what is tried."""


def learned(space: Sequence[Dimension], trials: Iterable[TuningTrial]) -> EffectModel:
    """The model that has these trials."""
    model = EffectModel(space, noise=NOISE)
    for trial in trials:
        model.learn(trial.configuration, FAILED if trial.ratio is None else math.log(trial.ratio))
    return model


def importance(space: Sequence[Dimension], trials: Iterable[TuningTrial]) -> dict[str, float]:
    """By setting: its share of the differences that the measured trials let expect between configurations.

    Empty if they are too few, or let expect none but noise.
    """
    measured = [trial for trial in trials if trial.ratio is not None and trial.facts.get("same_as") is None]
    changed = [trial for trial in measured if trial.configuration]
    return learned(space, changed).importance() if len(changed) >= FEWEST_TRIALS else {}


class EffectModel:
    """The effects and their covariance, after the trials so far."""

    def __init__(self, space: Sequence[Dimension], *, noise: float) -> None:
        self._space = tuple(space)
        self._variance = noise * noise
        values = [(each.name, value) for each in space for value in each.values if value is not None]
        pairs = [
            (first, second)
            for number, first in enumerate(values)
            for second in values[number + 1 :]
            if first[0] != second[0] and {first[0], second[0]} <= set(STRONG)
        ]
        self._index: dict[Feature, int] = {(value,): number for number, value in enumerate(values)}
        self._index |= {pair: len(values) + number for number, pair in enumerate(pairs)}
        scales = [STRONG_EFFECT if name in STRONG else WEAK_EFFECT for name, _ in values]
        scales += [PAIR_EFFECT] * len(pairs)
        self._mean = [0.0] * len(scales)
        self._tried: set[tuple[str, Any]] = set()
        self._covariance = [
            [scale * scale if row == column else 0.0 for column in range(len(scales))]
            for row, scale in enumerate(scales)
        ]

    def _features(self, configuration: Configuration) -> list[int]:
        """The features that a configuration has: those whose value is one, all others are zero."""
        values = [(name, value) for name, value in configuration.items() if ((name, value),) in self._index]
        pairs = ((a, b) for number, a in enumerate(values) for b in values[number + 1 :])
        return [self._index[(value,)] for value in values] + [
            self._index[pair] for pair in pairs if pair in self._index
        ]

    def learn(self, configuration: Configuration, log_ratio: float) -> None:
        """Effect: the model has this trial, too. A step of recursive least squares."""
        active = self._features(self._ordered(configuration))
        if not active:
            return
        self._tried.update(configuration.items())
        gains = [sum(row[each] for each in active) for row in self._covariance]
        total = self._variance + sum(gains[each] for each in active)
        surprise = log_ratio - sum(self._mean[each] for each in active)
        for row, gain in enumerate(gains):
            self._mean[row] += gain * surprise / total
            factor = gain / total
            if factor:
                own = self._covariance[row]
                for column, other in enumerate(gains):
                    own[column] -= factor * other

    def mean(self, configuration: Configuration) -> float:
        """The expected logarithm of the ratio."""
        return sum(self._mean[each] for each in self._features(self._ordered(configuration)))

    def bound(self, configuration: Configuration) -> float:
        """The upper confidence bound of the logarithm of the ratio."""
        active = self._features(self._ordered(configuration))
        variance = sum(self._covariance[row][column] for row in active for column in active)
        return sum(self._mean[each] for each in active) + CURIOSITY * math.sqrt(max(0.0, variance))

    def importance(self) -> dict[str, float]:
        """By setting: its share, of 1, of the variances of the settings' own effects; empty if these are but noise.

        A setting's own effect is that on the expected logarithm, averaged over the values of the others; its variance
        is over the values that were tried, and the default. A setting counts if what one of its values changes, alone
        or together with another setting's, is beyond noise. Source: Hutter et al., An efficient approach for assessing
        hyperparameter importance (2014), functional ANOVA.
        """
        variances = {each.name: self._own_variance(each) for each in self._space}
        total = sum(variances.values())
        return {name: round(each / total, 4) for name, each in variances.items()} if total else {}

    def _own_variance(self, dimension: Dimension) -> float:
        """The variance of the effects of the default and of a setting's values that were tried; 0 if they are noise."""
        values = [(dimension.name, value) for value in dimension.values if (dimension.name, value) in self._tried]
        clear = any(self._is_clear(number) for feature, number in self._index.items() if {*feature} & {*values})
        return pvariance([0.0, *(self._average(dimension, value) for _, value in values)]) if clear else 0.0

    def _is_clear(self, number: int) -> bool:
        """Whether a feature's effect is beyond what noise explains."""
        return abs(self._mean[number]) > CLEAR * math.sqrt(max(0.0, self._covariance[number][number]))

    def _average(self, dimension: Dimension, value: Any) -> float:
        """The effect of a value, averaged over the values of all other settings."""
        own = (dimension.name, value)
        found = self._mean[self._index[(own,)]]
        for other in self._space:
            pairs = [(own, (other.name, each)) for each in other.values]
            numbers = [self._index.get(pair, self._index.get(pair[::-1])) for pair in pairs]
            found += fmean(0.0 if number is None else self._mean[number] for number in numbers)
        return found

    def _ordered(self, configuration: Configuration) -> Configuration:
        return {each.name: configuration[each.name] for each in self._space if each.name in configuration}

    def promising(self) -> Iterator[Configuration]:
        """Configurations in the order of their bounds, of those that the model can tell apart."""
        expected = self._expected_best()
        wide = [each for each in self._space if each.name in STRONG]
        while math.prod(len(each.values) for each in wide) > MAX_COMBINED:
            wide.pop()
        names = [each.name for each in wide]
        found: dict[frozenset[tuple[str, Any]], Configuration] = {}
        for values in product(*(each.values for each in wide)):
            combined = {**expected, **dict(zip(names, values, strict=True))}
            _keep(found, ({name: value for name, value in combined.items() if value is not None},))
        best = max(found.values(), key=self.bound)
        _keep(found, neighbours(best, self._space))
        yield from sorted(found.values(), key=self.bound, reverse=True)

    def _expected_best(self) -> Configuration:
        """The configuration of the values whose own effects are expected to be largest."""

        def expected(name: str, value: Any) -> float:
            return 0.0 if value is None else self._mean[self._index[((name, value),)]]

        best = {each.name: max(each.values, key=partial(expected, each.name)) for each in self._space}
        return {name: value for name, value in best.items() if value is not None}


def _keep(found: dict[frozenset[tuple[str, Any]], Configuration], more: Iterable[Configuration]) -> None:
    for each in more:
        found.setdefault(frozenset(each.items()), each)
