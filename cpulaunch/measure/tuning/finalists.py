"""The final round: the best trials measured again, in turn with the default, before anything is claimed of them."""

from __future__ import annotations

from cpulaunch.measure.statistics import launch_order
from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Protocol

    from cpulaunch.measure.samples import Sample
    from cpulaunch.measure.tuning.space import Configuration
    from cpulaunch.measure.tuning.study import TuningTrial
    from cpulaunch.measure.tuning.trial import Guard

    class RatioEstimate(Protocol):
        """A ratio with its interval, whose ends are None with too few rounds."""

        @property
        def ratio(self) -> float: ...
        @property
        def low(self) -> float | None: ...
        @property
        def high(self) -> float | None: ...
        @property
        def rounds(self) -> int: ...


FINALISTS = 3
HOPELESS = 0.98
"""A trial that was slower than this against the default is not measured again."""
REFUTING = 3
"""Rounds of the final round in which a finalist that was no faster is refuted: as many as a trial has launches."""
NEAR = 0.99
"""Finalists of at least this part of the best one's speed count as equally fast."""


@record
class Finalist:
    """A configuration in the final round.

    `estimate`: how many times as fast as the default it is; None before any round. `failure`: why it cannot win;
    `values`: its figures in the order of rounds.
    """

    configuration: Configuration
    values: tuple[float, ...] = ()
    estimate: RatioEstimate | None = None
    failure: str | None = None

    @property
    def is_faster(self) -> bool:
        """Whether it is shown to be faster than the default."""
        low = None if self.estimate is None else self.estimate.low
        return self.failure is None and low is not None and low > 1

    @property
    def is_refuted(self) -> bool:
        """Whether it failed in the final round, or was no faster in as many rounds as a trial has launches."""
        found = self.estimate
        return self.failure is not None or (found is not None and found.ratio <= 1 and found.rounds >= REFUTING)


@record
class FinalRound:
    """The finalists, and the default's figures. `interrupted`: it did not come to its end."""

    finalists: tuple[Finalist, ...] = ()
    default: tuple[float, ...] = ()
    interrupted: bool = False

    @property
    def winner(self) -> Finalist | None:
        """The fastest finalist that is shown to be faster than the default; None if none is.

        Of those that are nearly as fast, it is the one with the fewest settings.
        """
        faster = [
            (each, each.estimate.ratio) for each in self.finalists if each.is_faster and each.estimate is not None
        ]
        best = max((ratio for _, ratio in faster), default=0.0)
        near = [(each, ratio) for each, ratio in faster if ratio >= NEAR * best]
        return min(near, key=lambda each: (len(each[0].configuration), -each[1]), default=(None, 0.0))[0]


@record
class FinalSetup:
    """The means of a final round. `estimate`: the ratio of a side to the default, from both figures and the sides.

    `seconds_left`: for another round. `seed`: of the order of launches. After `least_rounds` (None: all) no more rounds
    follow once the result is clear.
    """

    launch: Callable[[Configuration], Sample]
    guard: Guard
    estimate: Callable[[Sequence[float], Sequence[float], int], RatioEstimate]
    lower_is_better: bool
    rounds: int
    seconds_left: Callable[[], float]
    seed: int
    least_rounds: int | None = None
    progress: Callable[[int, int], None] = field(default=lambda number, rounds: None)


def choose_finalists(trials: Sequence[TuningTrial], count: int = FINALISTS) -> tuple[Configuration, ...]:
    """The configurations of the best trials that did not fail, the fastest first.

    Those that were cut short too: what is known of the default since then may have made them better.
    """
    usable = [trial for trial in trials if trial.ratio is not None and trial.ratio > HOPELESS and trial.configuration]
    usable.sort(key=lambda trial: -(trial.ratio or 0.0))
    found: dict[frozenset[tuple[str, object]], Configuration] = {}
    for trial in usable:
        if not trial.facts.get("repeated"):
            found.setdefault(frozenset(trial.configuration.items()), trial.configuration)
    return tuple(found.values())[:count]


def launch_seconds(configuration: Configuration, trials: Sequence[TuningTrial]) -> float:
    """How long a launch of a configuration took in the trial of it that was measured."""
    measured = (each.facts for each in trials if each.configuration == configuration and each.facts.get("values"))
    default: Mapping[str, Any] = {"values": (0.0,)}  # The program may have changed what was kept of the trial.
    facts = next(measured, default)
    return float(facts.get("seconds", 0.0)) / len(facts["values"])


def run_final_round(setup: FinalSetup, configurations: Sequence[Configuration]) -> FinalRound:
    """The final round's result. A configuration that fails once is out of it.

    Rounds of which a launch of the default fails do not count. After Ctrl-C: what there is.
    """
    sides: list[Configuration] = [{}, *configurations]
    rounds: list[dict[int, float]] = []
    failures: dict[int, str] = {}
    interrupted = False
    try:
        for number in range(setup.rounds):
            if setup.seconds_left() <= 0 or len(failures) == len(configurations):
                break
            if number >= (setup.least_rounds or setup.rounds) and _is_clear(_finalists(setup, sides, rounds, failures)):
                break
            setup.progress(number, setup.rounds)
            rounds.append(_one_round(setup, sides, failures, launch_order(number, len(sides), seed=setup.seed)))
    except KeyboardInterrupt:
        interrupted = True
    return FinalRound(
        finalists=_finalists(setup, sides, rounds, failures),
        default=tuple(each[0] for each in rounds if 0 in each),
        interrupted=interrupted,
    )


def _is_clear(finalists: Sequence[Finalist]) -> bool:
    """Whether the fastest finalist is shown to be faster than the default, or every one not to be."""
    left = [(each, each.estimate) for each in finalists if each.failure is None and each.estimate is not None]
    if not left:
        return True
    fastest, _ = max(left, key=lambda each: each[1].ratio)
    return fastest.is_faster or all(found.high is not None and found.high < 1 for _, found in left)


def _finalists(
    setup: FinalSetup, sides: Sequence[Configuration], rounds: Sequence[dict[int, float]], failures: dict[int, str]
) -> tuple[Finalist, ...]:
    """The finalists after the rounds in which the default has a figure."""
    complete = [each for each in rounds if 0 in each]
    return tuple(_finalist(setup, sides, side, complete, failures) for side in range(1, len(sides)))


def _one_round(
    setup: FinalSetup, sides: Sequence[Configuration], failures: dict[int, str], order: Sequence[int]
) -> dict[int, float]:
    """The figure of each side that has not failed yet. Effect: sides that fail are added to `failures`."""
    figures: dict[int, float] = {}
    for side in order:
        if side in failures:
            continue
        sample = setup.launch(sides[side])
        failure = setup.guard.failure(sample)
        if failure is None and sample.value is not None:
            figures[side] = sample.value
        elif side:
            failures[side] = failure or "it has no figure"
    return figures


def _finalist(
    setup: FinalSetup,
    sides: Sequence[Configuration],
    side: int,
    rounds: Sequence[dict[int, float]],
    failures: dict[int, str],
) -> Finalist:
    pairs = [(each[0], each[side]) for each in rounds if side in each]
    own = tuple(value for _, value in pairs)
    if side in failures or not pairs:
        return Finalist(configuration=sides[side], values=own, failure=failures.get(side))
    default = [speed_of(value, setup) for value, _ in pairs]
    estimate = setup.estimate(default, [speed_of(value, setup) for value in own], len(sides))
    return Finalist(configuration=sides[side], values=own, estimate=estimate)


def speed_of(value: float, setup: FinalSetup) -> float:
    """A figure as a speed: larger is better."""
    return 1 / value if setup.lower_is_better else value
