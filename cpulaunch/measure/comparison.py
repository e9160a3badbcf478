"""The loop of a comparison: rounds of launches until the interval is narrow enough, or a limit is reached.

Effects are injected: `take` launches a side once, `clock` tells the seconds.
"""

from __future__ import annotations

from dataclasses import replace

from cpulaunch.measure.disturbance import disturbance_reasons
from cpulaunch.measure.metric_choice import found_choice
from cpulaunch.measure.samples import MetricChoice, Sample, Side
from cpulaunch.measure.statistics import MOST_ROUNDS, Estimate, estimate, launch_order
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal, TypeAlias

    from cpulaunch.measure.statistics import Verdict

    Ending = Literal["precise", "rounds", "budget", "interrupted", "failed"]
    Take: TypeAlias = Callable[[Side, MetricChoice | None, float], Sample]
    """(side, figure; None: all that the program reports; time limit in seconds) -> its sample."""

MOST_FAILURES = 2
"""So many failed launches of one side after the first rounds end the comparison: one may be an accident."""
LIMIT_FACTOR, LIMIT_SECONDS = 10, 60
"""A launch that takes longer than this multiple of the longest one, and this, hangs."""


@record
class ComparisonLimits:
    """When to stop: at this precision, after so many rounds, or before a round that would exceed the budget."""

    until: float = 0.02
    rounds: int = 40
    budget_seconds: float = 1800.0


@record
class Round:
    """One launch of each side; `samples` are in the order of the sides, which were launched in that of `order`."""

    order: tuple[int, ...]
    samples: tuple[Sample, ...]

    def disturbed_by(self, side: int) -> tuple[str, ...]:
        """What disturbed the sample of a side; empty if nothing did."""
        return disturbance_reasons(self.samples[side].disturbance, seconds=self.samples[side].seconds)

    def without_reports(self) -> Round:
        """The round without the largest parts of its samples, which only the last one needs."""
        samples = [replace(sample, report=None, checksums={}) for sample in self.samples]
        return replace(self, samples=tuple(samples))


@record
class FailedLaunch:
    """A launch that yielded no figure. `number`: its round, from 1; 0 for the first launches, which do not count."""

    side: int
    number: int
    sample: Sample


@record
class ComparisonResult:
    """What a comparison has found so far. `ended` is None while it runs; `warm_up`: the first launch of each side."""

    sides: tuple[Side, ...]
    choice: MetricChoice | None = None
    warm_up: tuple[Sample, ...] = ()
    rounds: tuple[Round, ...] = ()
    failures: tuple[FailedLaunch, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    """Of each side but the first; empty before the first round."""
    seconds: float = 0.0
    ended: Ending | None = None
    next_side: int = 0
    """The side that is launched now."""

    def values(self, side: int) -> tuple[float, ...]:
        """The figures of a side, in the order of rounds."""
        return tuple(each.samples[side].value or 0.0 for each in self.rounds)

    def verdict(self, number: int) -> Verdict | Literal["failed"]:
        """What the interval says of a side; of one that fails again and again, or against one that does, nothing."""
        if self.ended == "failed" and self.failures and self.failures[-1].side in (0, number):
            return "failed"
        return self.estimates[number - 1].verdict


class Comparer:
    """A comparison in progress. `progress` is called before each launch. `seed`: of the order of launches."""

    def __init__(
        self,
        sides: Sequence[Side],
        limits: ComparisonLimits,
        *,
        take: Take,
        clock: Callable[[], float],
        progress: Callable[[ComparisonResult], None],
        seed: int,
    ) -> None:
        self._sides = tuple(sides)
        self._limits = limits
        self._take = take
        self._clock = clock
        self._progress = progress
        self._seed = seed
        self._begun = clock()
        self._choice: MetricChoice | None = None
        self._warm_up: list[Sample] = []
        self._rounds: list[Round] = []
        self._failures: list[FailedLaunch] = []
        self._longest_round = 0.0

    def run(self, choice: MetricChoice | None, *, lower: bool | None = None) -> ComparisonResult:
        """The finished comparison. `choice` None: chosen by what the program reports, `lower` as its direction.

        Raises: UsageError if the sides report no metric in common.
        """
        try:
            self._choice = choice
            if not self._warm_up_all():
                return self._result("failed")
            if choice is None:
                labels = [side.label for side in self._sides]
                self._choice = found_choice([each.metrics for each in self._warm_up], labels, lower)
            return self._result(self._run_rounds())
        except KeyboardInterrupt:
            return self._result("interrupted")

    def _warm_up_all(self) -> bool:
        """Whether each side could be launched once: caches are filled now, and captures that are kept are made."""
        for number, side in enumerate(self._sides):
            self._progress(self._result(None, next_side=number))
            sample = self._take(side, self._choice, self._left())
            if sample.failure is not None:
                self._failures.append(FailedLaunch(side=number, number=0, sample=sample))
                return False
            self._warm_up.append(sample)
        self._longest_round = sum(sample.seconds for sample in self._warm_up)
        return True

    def _left(self) -> float:
        return max(1.0, self._limits.budget_seconds - (self._clock() - self._begun))

    def _run_rounds(self) -> Ending:
        number = 0
        while True:
            ending = self._ending(number)
            if ending is not None:
                return ending
            started = self._clock()
            done = self._run_round(number)
            number += 1
            self._longest_round = max(self._longest_round, self._clock() - started)
            if done is not None:
                self._rounds[-1:] = [each.without_reports() for each in self._rounds[-1:]]
                self._rounds.append(done)
            elif self._fails_repeatedly():
                return "failed"

    def _ending(self, number: int) -> Ending | None:
        """Why no further round is to begin; None if one is."""
        found = self._estimates()
        until = self._limits.until
        if until > 0 and found and all(each.precision <= until for each in found):
            return "precise"
        if number >= min(self._limits.rounds, MOST_ROUNDS):
            return "rounds"
        elapsed = self._clock() - self._begun
        return "budget" if elapsed + self._longest_round > self._limits.budget_seconds else None

    def _run_round(self, number: int) -> Round | None:
        """The round; None if a launch failed: what was launched before it has no counterpart."""
        order = launch_order(number, len(self._sides), seed=self._seed)
        samples: dict[int, Sample] = {}
        for side in order:
            self._progress(self._result(None, next_side=side))
            sample = self._take(self._sides[side], self._choice, self._limit())
            if sample.failure is not None:
                self._failures.append(FailedLaunch(side=side, number=number + 1, sample=sample))
                return None
            samples[side] = sample
        return Round(order=order, samples=tuple(samples[side] for side in range(len(self._sides))))

    def _limit(self) -> float:
        longest = max(sample.seconds for sample in self._warm_up)
        return LIMIT_FACTOR * longest + LIMIT_SECONDS

    def _fails_repeatedly(self) -> bool:
        return sum(each.side == self._failures[-1].side for each in self._failures) >= MOST_FAILURES

    def _estimates(self) -> tuple[Estimate, ...]:
        if not self._rounds or self._choice is None:
            return ()
        values = [[each.samples[side].value or 0.0 for each in self._rounds] for side in range(len(self._sides))]
        return tuple(
            estimate(values[0], other, lower_is_better=self._choice.lower_is_better, sides=len(self._sides))
            for other in values[1:]
        )

    def _result(self, ended: Ending | None, *, next_side: int = 0) -> ComparisonResult:
        return ComparisonResult(
            sides=self._sides,
            choice=self._choice,
            warm_up=tuple(self._warm_up),
            rounds=tuple(self._rounds),
            failures=tuple(self._failures),
            estimates=self._estimates(),
            seconds=self._clock() - self._begun,
            ended=ended,
            next_side=next_side,
        )
