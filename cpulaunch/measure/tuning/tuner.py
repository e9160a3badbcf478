"""A whole tuning: first launches, the search, and the final round; Ctrl-C at any moment keeps what there is.

Effects are injected: `take` launches the program once, `clock` tells the seconds.
"""

from __future__ import annotations

import shlex
from statistics import median

from cpulaunch.measure.comparison_text import metric_label
from cpulaunch.measure.metric_choice import found_choice, overload_text
from cpulaunch.measure.statistics import estimate, fewest_rounds
from cpulaunch.measure.tuning.finalists import (
    FINALISTS,
    FinalRound,
    FinalSetup,
    choose_finalists,
    launch_seconds,
    run_final_round,
)
from cpulaunch.measure.tuning.knowledge import first_configurations
from cpulaunch.measure.tuning.model import importance
from cpulaunch.measure.tuning.search import SearchSetup, best_trial, run_search
from cpulaunch.measure.tuning.space import options_of
from cpulaunch.measure.tuning.trial import Baseline, Guard
from cpulaunch.records.errors import CpulaunchError, UsageError
from cpulaunch.records.record import field, record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Any, Literal, TypeAlias

    from cpulaunch.measure.samples import MetricChoice, Sample
    from cpulaunch.measure.statistics import Estimate
    from cpulaunch.measure.tuning.outputs.numerics import Outputs
    from cpulaunch.measure.tuning.space import Configuration, Dimension
    from cpulaunch.measure.tuning.study import Study, TuningTrial

    TuneEnding: TypeAlias = Literal["finished", "interrupted"]

FINAL_ROUNDS = 24
LIMIT_FACTOR, LIMIT_SECONDS = 3, 60
"""A launch that takes longer than this multiple of the default's, and this, hangs or is hopeless."""
LATENCY_METRIC = "latency p95 (ms)"
LATENCY_HINT = "serve requests in a loop: for number in cpulaunch.requests(20, 500): ..."
FINAL_SHARE, VERDICT_SHARE = 0.5, 2 / 3
"""The largest parts of the time that are kept for the final round: of all finalists, of one to a first verdict."""


@record
class TuneLimits:
    """When the search ends: after so many trials, or this time. `launch_seconds`: of each launch; None: measured."""

    trials: int = 40
    seconds: float = 1800.0
    launch_seconds: float | None = None


@record
class TuneGoal:
    """What is to become best. `choice` None: the first metric that the program reports, `lower` as its direction.

    `max_error`: how far outputs may be from the reference's; None: as rounding makes them. `throughput`: the number of
    instances varies, over which the metric is summed; `ranks`: so does that of ranks. `latency`: that of requests is
    the figure, `rate` per second (None: as the program says).
    """

    choice: MetricChoice | None = None
    lower: bool | None = None
    max_error: float | None = None
    throughput: bool = False
    ranks: bool = False
    latency: bool = False
    rate: float | None = None


@record
class TuneMeans:
    """The effects of a tuning, and what is known before.

    `take`: a sample of a configuration (None: of the reference, plain Python), with the figure, None if it is not
    chosen yet, and a time limit in seconds. `seed`: of the order of launches in the final round. `written`: the outputs
    in the file of --output after a launch, if there is one. `levels`, `past`: what to try first.
    """

    space: Sequence[Dimension]
    take: Callable[[Configuration | None, MetricChoice | None, float], Sample]
    effect: Callable[[Configuration], Hashable]
    clock: Callable[[], float]
    progress: Callable[[str], None]
    seed: int
    written: Callable[[], Outputs | None] | None = None
    levels: Sequence[Configuration] = ()
    past: Sequence[Configuration] = ()


@record
class Tuned:
    """What a tuning found. `reference`: the first launch of plain Python; None before it. `outputs`: their names."""

    ended: TuneEnding = "finished"
    choice: MetricChoice | None = None
    reference: Sample | None = None
    outputs: tuple[str, ...] = ()
    trials: Sequence[TuningTrial] = ()
    baseline: Sequence[dict[str, Any]] = ()
    importance: dict[str, float] = field(default_factory=dict)
    final: FinalRound = field(default_factory=FinalRound)
    seconds: float = 0.0


class Tuner:
    """A tuning in progress."""

    def __init__(self, means: TuneMeans, limits: TuneLimits, goal: TuneGoal) -> None:
        self._means = means
        self._limits = limits
        self._goal = goal
        self._begun = means.clock()
        self._found = Tuned()
        self._guard = Guard()
        self._seconds: list[float] = []

    def run(self, study: Study) -> Tuned:
        """What was found. Raises: CpulaunchError if the program fails under plain Python or cpulaunch's defaults."""
        try:
            self._first_launches(self._goal.choice)
            self._search(study)
        except KeyboardInterrupt:
            study.interrupt()
            self._found = replace(self._found, ended="interrupted")
        self._keep(study)
        if self._found.ended == "finished":
            final = self._final_round(study)
            ended: TuneEnding = "interrupted" if final.interrupted else "finished"
            self._found = replace(self._found, final=final, ended=ended)
        return replace(self._found, seconds=self._elapsed())

    def _elapsed(self) -> float:
        return self._means.clock() - self._begun

    def _left(self) -> float:
        return self._limits.seconds - self._elapsed()

    def _limit(self) -> float:
        """The time limit of a launch, in seconds."""
        if self._limits.launch_seconds is not None:
            return self._limits.launch_seconds
        if not self._seconds:
            return max(LIMIT_SECONDS, self._limits.seconds)
        return LIMIT_FACTOR * max(self._seconds) + LIMIT_SECONDS

    def _first_launches(self, choice: MetricChoice | None) -> None:
        """Effect: the figure is chosen, and the reference of outputs is known. These launches do not count."""
        means = self._means
        means.progress("first launches, which do not count: the reference")
        reference = means.take(None, choice, self._limit())
        if reference.failure is not None and not _cannot_bear_the_load(reference, choice):
            hint = LATENCY_HINT if self._goal.latency and reference.exit_code == 0 else None
            raise CpulaunchError("the program fails without cpulaunch", value=reference.failure, hint=hint)
        guard = Guard(max_error=self._goal.max_error, output=means.written, by_rank=reference.report is not None)
        references = guard.outputs(reference)
        if references is None:
            raise UsageError("the program does not write the file of --output", hint="--output FILE that it writes")
        outputs = tuple(dict.fromkeys(name for each in references for name in each))
        if self._goal.max_error is not None and not outputs:
            raise UsageError(
                "--max-error needs outputs to compare, and the program gives none",
                hint="call cpulaunch.checksum(tensor) in it, or name a file that it writes: --output FILE",
            )
        self._guard = replace(guard, references=references)
        self._seconds.append(reference.seconds)
        means.progress("first launches, which do not count: cpulaunch's defaults")
        default = means.take({}, choice, self._limit())
        self._check_default(default, choice)
        if choice is None:
            choice = found_choice([reference.metrics, default.metrics], ["python", "cpulaunch"], self._goal.lower)
        _check_throughput(choice, throughput=self._goal.throughput)
        self._seconds.append(default.seconds)
        self._found = replace(
            self._found,
            reference=reference,
            outputs=outputs,
            choice=choice,
        )

    def _check_default(self, default: Sample, choice: MetricChoice | None) -> None:
        """Raises: CpulaunchError if the default fails, or its outputs are not those of the reference."""
        failure = self._guard.failure(default)
        if failure is None:
            return
        if _cannot_bear_the_load(default, choice):
            served = default.metrics.get("requests/s")
            below = "" if served is None else f", below the {served:.3g} requests per second that it served"
            raise CpulaunchError("cpulaunch's defaults cannot bear the load", value=failure, hint=f"--rate R{below}")
        if default.failure is not None:
            raise CpulaunchError("the program fails under cpulaunch's defaults", value=failure)
        self._means.progress("first launches, which do not count: the reference again")
        again = self._means.take(None, None, self._limit())
        if again.failure is None and self._guard.wrong(self._guard.outputs(again) or [{}]):
            raise CpulaunchError(
                "the program's outputs change from launch to launch without cpulaunch: they cannot be compared",
                value=failure,
                hint="set its seeds (torch.manual_seed), or allow more with --max-error",
            )
        raise CpulaunchError(
            "the outputs under the fixed options are not those of "
            + ("-O0" if self._guard.by_rank else "plain Python"),
            value=failure,
            hint="allow it with --max-error, or give other options",
        )

    def _search(self, study: Study) -> None:
        baseline = Baseline()
        kept = self._kept_seconds() + self._typical()
        choice = self._choice()
        setup = SearchSetup(
            space=self._means.space,
            launch=lambda configuration: self._launch(configuration, study),
            effect=self._means.effect,
            seconds_left=lambda: self._left() - (kept if self._found.trials else 0.0),
            guard=self._guard,
            lower_is_better=choice.lower_is_better,
            max_trials=self._limits.trials,
            notify=lambda trial, best: self._keep(study),
        )
        first = first_configurations(self._means.space, levels=self._means.levels, past=self._means.past)
        run_search(setup, study, baseline, first)

    def _typical(self) -> float:
        return median(self._seconds)

    def _final_seconds(self, seconds: Sequence[float]) -> float:
        """The time that a final round needs for a verdict, with finalists whose launches take these seconds."""
        return fewest_rounds(len(seconds) + 1) * (self._typical() + sum(seconds))

    def _kept_seconds(self) -> float:
        """The part of the time that is kept for the final round: enough for one finalist, if that is possible."""
        total, typical = self._limits.seconds, self._typical()
        kept = min(FINAL_SHARE * total, self._final_seconds([typical] * FINALISTS))
        least = self._final_seconds([typical])
        return max(kept, least) if least <= VERDICT_SHARE * total else kept

    def _finalists(self) -> tuple[Configuration, ...]:
        """The best trials, as many as there is time for a verdict on; the best one in any case."""
        trials = self._found.trials
        for count in range(FINALISTS, 0, -1):
            chosen = choose_finalists(trials, count)
            if not chosen or self._final_seconds([launch_seconds(each, trials) for each in chosen]) <= self._left():
                break
        return chosen

    def _choice(self) -> MetricChoice:
        assert self._found.choice is not None
        return self._found.choice

    def _launch(self, configuration: Configuration, study: Study) -> Sample:
        """A sample of the search. Effect: shows what is launched, and the best so far."""
        number = len(self._found.trials) + 1
        what = shlex.join(options_of(configuration)) if configuration else "the default again"
        self._means.progress(f"trial {number} of at most {self._limits.trials}{self._best_text()}: {what}")
        sample = self._means.take(configuration, self._choice(), self._limit())
        if not configuration and sample.failure is None:
            self._seconds.append(sample.seconds)
        return sample

    def _best_text(self) -> str:
        best = best_trial(self._found.trials)
        return "" if best is None or best.ratio is None else f", best so far {max(1.0, best.ratio):.2f}"

    def _keep(self, study: Study) -> None:
        """Effect: what is in the study is part of the result."""
        self._found = replace(self._found, trials=study.trials(), baseline=study.baselines())

    def _final_round(self, study: Study) -> FinalRound:
        """The final round of the best trials against the default."""
        chosen = self._finalists()
        self._found = replace(self._found, importance=importance(self._means.space, study.trials()))
        if not chosen:
            return FinalRound()
        choice = self._choice()
        sides = len(chosen) + 1

        def ratio(default: Sequence[float], own: Sequence[float], count: int) -> Estimate:
            return estimate(default, own, lower_is_better=False, sides=count)

        def show(number: int, rounds: int) -> None:
            self._means.progress(
                f"final round {number + 1} of at most {rounds}: the best {len(chosen)} and the default"
            )

        setup = FinalSetup(
            launch=lambda configuration: self._means.take(configuration, choice, self._limit()),
            guard=self._guard,
            estimate=ratio,
            lower_is_better=choice.lower_is_better,
            rounds=FINAL_ROUNDS,
            least_rounds=fewest_rounds(sides),
            seconds_left=self._left,
            seed=self._means.seed,
            progress=show,
        )
        return run_final_round(setup, chosen)


def _cannot_bear_the_load(sample: Sample, choice: MetricChoice | None) -> bool:
    """Whether a launch has no figure only because requests arrived faster than it served them; it has outputs."""
    if choice is None or sample.failure is None:
        return False
    return sample.failure == overload_text(metric_label(choice), sample.metrics)


def _check_throughput(choice: MetricChoice, *, throughput: bool) -> None:
    """Raises: UsageError if sums of this figure over instances are no throughput."""
    is_time = choice.name is None and choice.pattern is None
    if throughput and (is_time or choice.lower_is_better):
        raise UsageError(
            "--throughput needs a rate, which can be summed over instances",
            value="the wall time" if is_time else choice.name or choice.pattern,
            hint='cpulaunch.metric("samples/s", ...) in the program, or --metric and --higher-is-better',
        )
