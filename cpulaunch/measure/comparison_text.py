"""A comparison in words: the verdict, a table of the sides, and what disturbed the measurement. Pure."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median

from cpulaunch.launch.output.metrics import metric_name, short_number
from cpulaunch.measure.metric_choice import choice_name, is_rate_or_time
from cpulaunch.measure.statistics import drift, fewest_rounds, spread
from cpulaunch.records.errors import escaped
from cpulaunch.records.host import count_text
from cpulaunch.view.text import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cpulaunch.measure.comparison import ComparisonLimits, ComparisonResult
    from cpulaunch.measure.samples import MetricChoice, Sample
    from cpulaunch.measure.statistics import Estimate

DIGITS = 3
"""Significant digits of a ratio; close to 1 as many decimals as its interval is wide."""
COLUMNS = (12, 8, 8, 15)
"""Widths of the table's columns behind the sides' labels."""


def metric_label(choice: MetricChoice) -> str:
    """What the compared figure is called."""
    return choice_name(choice, pattern_name=metric_name(choice.pattern or ""))


def comparison_text(
    comparison: ComparisonResult, limits: ComparisonLimits, *, width: int, strong: Callable[[str], str]
) -> str:
    """All of a finished comparison. `strong`: writes the verdict so that it is seen first."""
    lines: list[str] = []
    for verdict in verdicts(comparison):
        lines += [strong(line) for line in wrapped(verdict, width)]
    if comparison.rounds and comparison.choice is not None:
        lines += ["", *_table(comparison, comparison.choice, width), ""]
    for remark in remarks(comparison, limits):
        lines += wrapped(remark, width)
    return "\n".join(lines)


def verdicts(comparison: ComparisonResult) -> list[str]:
    """A sentence for each side but the first."""
    if not comparison.estimates or comparison.choice is None:
        return ["no verdict: no round was completed"]
    return [verdict_text(comparison, number) for number in range(1, len(comparison.sides))]


def verdict_text(comparison: ComparisonResult, number: int) -> str:
    """What the comparison says of a side against the first one."""
    found = comparison.estimates[number - 1]
    first, other = (escaped(comparison.sides[each].label) for each in (0, number))
    choice = comparison.choice
    quality = "fast" if choice is None or is_rate_or_time(metric_label(choice)) else "good"
    better, worse = ("faster", "slower") if quality == "fast" else ("better", "worse")
    rounds = count_text(found.rounds, "round")
    times = f"{ratio_text(found)} times as {quality}"
    verdict = comparison.verdict(number)
    if verdict == "failed":
        launches = f"{_failed_label(comparison)} failed in {_failed_count(comparison)} launches"
        return f"no verdict: {launches}; {other} was {times} as {first} in the median of {rounds}"
    if found.low is None or found.high is None:
        least = fewest_rounds(len(comparison.sides))
        return f"no verdict: {other} was {times} as {first} in the median of {rounds}; a verdict needs {least}"
    between = f"between {ratio_text(found, found.low)} and {ratio_text(found, found.high)}; {rounds}"
    if verdict == "no difference":
        return f"no difference that this machine can show: {other} is {times} as {first}, {between}"
    word = better if verdict == "better" else worse
    return f"{other} is {word} than {first}: {times}, {between}"


def budget_warning(comparison: ComparisonResult, limits: ComparisonLimits) -> str:
    """That the budget may not suffice for a verdict, after the first launches; empty if it suffices, or later."""
    least = fewest_rounds(len(comparison.sides))
    is_first = not comparison.rounds and len(comparison.warm_up) == len(comparison.sides)
    if not is_first or limits.rounds < least or _least_seconds(comparison) <= limits.budget_seconds:
        return ""
    given = f"--budget {limits.budget_seconds:g}"
    longer = f"give --budget {_sufficient_budget(comparison, limits)}"
    return f"warning: a verdict needs {least} rounds, for which {given} may not suffice: {longer}"


def _least_seconds(comparison: ComparisonResult) -> float:
    """The budget with which a verdict's last round begins, if launches go on as they are.

    A round begins if the longest one so far would end in time; the first launches of the sides are as long as a round.
    """
    longest, rounds = _longest_seconds(comparison), len(comparison.rounds)
    per_round = comparison.seconds / (rounds + 1) if rounds else longest
    return fewest_rounds(len(comparison.sides)) * per_round + longest


def _longest_seconds(comparison: ComparisonResult) -> float:
    """How long the longest round was, or the first launches together."""
    rounds = (comparison.warm_up, *(each.samples for each in comparison.rounds))
    return max(sum(sample.seconds for sample in samples) for samples in rounds)


def _sufficient_budget(comparison: ComparisonResult, limits: ComparisonLimits) -> int:
    """A budget in seconds that is larger than the given one, and a tenth more than a verdict needs."""
    needed = max(11 * _least_seconds(comparison) / 10, limits.budget_seconds + _longest_seconds(comparison))
    return 10 * math.ceil(needed / 10)


def _failed_label(comparison: ComparisonResult) -> str:
    """The side whose failure ended the comparison."""
    return escaped(comparison.sides[comparison.failures[-1].side].label)


def _failed_count(comparison: ComparisonResult) -> int:
    """How many launches of that side failed."""
    return sum(each.side == comparison.failures[-1].side for each in comparison.failures)


def ratio_text(found: Estimate, value: float | None = None) -> str:
    """The ratio, or one end of its interval, with as many digits as tell these three apart."""
    value = found.ratio if value is None else value
    ends = (found.ratio, found.low or found.ratio, found.high or found.ratio)
    decimals = next((each for each in (2, 3, 4) if _are_apart(ends, each)), 2)
    return f"{value:.{decimals}f}" if value < 100 else f"{value:.0f}"


def _are_apart(ends: tuple[float, ...], decimals: int) -> bool:
    """Whether 1 and both ends of the interval remain on their sides of each other after rounding."""
    _, low, high = (round(each, decimals) for each in ends)
    return (low > 1) == (ends[1] > 1) and (high < 1) == (ends[2] < 1)


def _table(comparison: ComparisonResult, choice: MetricChoice, width: int) -> Iterator[str]:
    label = metric_label(choice)
    unit = _shortened(escaped(label) + (" (s)" if choice.name is None and choice.pattern is None else ""), 24)
    medians = [short_number(median(comparison.values(number))) for number in range(len(comparison.sides))]
    wide = max(COLUMNS[0], *(len(each) + 2 for each in (unit, *medians)))
    room = max(12, width - wide - sum(COLUMNS[1:]))
    names = [_shortened(escaped(side.label), room) for side in comparison.sides]
    room = max(len("side"), *map(len, names))
    yield "side".ljust(room) + _cells((unit, "spread", "ratio", "between"), wide)
    for number, name in enumerate(names):
        values = comparison.values(number)
        ratio, between = "1", ""
        if number:
            found = comparison.estimates[number - 1]
            ratio = ratio_text(found)
            between = "" if found.low is None else f"{ratio_text(found, found.low)}-{ratio_text(found, found.high)}"
        yield (name.ljust(room) + _cells((medians[number], f"{spread(values):.1%}", ratio, between), wide)).rstrip()


def _cells(cells: tuple[str, ...], first: int) -> str:
    widths = (first, *COLUMNS[1:])
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _shortened(text: str, room: int) -> str:
    """The text with its middle left out if it is longer than the room."""
    half = (room - 3) // 2
    return text if len(text) <= room else f"{text[: room - 3 - half]}...{text[-half:]}"


def remarks(comparison: ComparisonResult, limits: ComparisonLimits) -> Iterator[str]:
    """What else there is to know of a comparison, a sentence each."""
    if comparison.choice is not None:
        direction = "less" if comparison.choice.lower_is_better else "more"
        others = [name for name in _reported(comparison) if name != metric_label(comparison.choice)]
        also = f"; also reported: {', '.join(map(escaped, others))}" if others else ""
        yield f"compared: {escaped(metric_label(comparison.choice))}, of which {direction} is better{also}"
    yield from (_ending_text(comparison, limits), *_failure_texts(comparison), *_disturbance_texts(comparison))
    yield from _switch_text(comparison)
    for number, side in enumerate(comparison.sides):
        change = drift(comparison.values(number))
        if change is not None:
            yield (
                f"{escaped(side.label)} drifted by {change:+.1%} from the first to the last round; "
                "the order of launches evens that out"
            )


def _reported(comparison: ComparisonResult) -> list[str]:
    return list(dict.fromkeys(name for sample in comparison.warm_up for name in sample.metrics))


def _ending_text(comparison: ComparisonResult, limits: ComparisonLimits) -> str:
    rounds = count_text(len(comparison.rounds), "round")
    reason = {
        "precise": f"every interval is within {limits.until:.3g} of its ratio (--until {limits.until * 100:g}%)",
        "rounds": f"that is all of --rounds {limits.rounds}",
        "budget": f"another round would exceed --budget {limits.budget_seconds:g}",
        "interrupted": "interrupted",
        "failed": "a side failed",
        None: "running",
    }[comparison.ended]
    has_verdict = bool(comparison.estimates) and all(each.low is not None for each in comparison.estimates)
    may_have_one = limits.rounds >= fewest_rounds(len(comparison.sides)) and bool(comparison.warm_up)
    if comparison.ended == "budget" and may_have_one and not has_verdict:
        reason += f"; for a verdict give --budget {_sufficient_budget(comparison, limits)}"
    return f"{rounds} in {_duration(comparison.seconds)}; ended because {reason}".replace(
        "because interrupted", "by a signal"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _failure_texts(comparison: ComparisonResult) -> Iterator[str]:
    for failure in comparison.failures:
        place = "its first launch" if failure.number == 0 else f"round {failure.number}, which does not count"
        yield f"{escaped(comparison.sides[failure.side].label)} failed in {place}: {failure.sample.failure}"


def _disturbance_texts(comparison: ComparisonResult) -> Iterator[str]:
    """How many rounds were disturbed, and by what."""
    found = [
        sorted({_kind(text) for side in range(len(comparison.sides)) for text in each.disturbed_by(side)})
        for each in comparison.rounds
    ]
    disturbed = [each for each in found if each]
    if disturbed:
        kinds = Counter(kind for each in disturbed for kind in each)
        by = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
        yield f"{len(disturbed)} of {count_text(len(found), 'round')} disturbed: {by}; these rounds count too"


def _switch_text(comparison: ComparisonResult) -> Iterator[str]:
    """How often threads of each side had to make room for others, in a second of its median launch."""
    if not comparison.rounds:
        return
    sides = [[each.samples[side] for each in comparison.rounds] for side in range(len(comparison.sides))]
    rates = [median(_switches_per_second(each) for each in samples) for samples in sides]
    if any(rates):
        shown = zip(comparison.sides, rates, strict=True)
        listed = ", ".join(f"{escaped(side.label)} {short_number(rate)}" for side, rate in shown)
        yield f"involuntary context switches per second, in the median: {listed}"


def _switches_per_second(sample: Sample) -> float:
    return sample.disturbance.involuntary_switches / sample.seconds if sample.seconds else 0.0


def _kind(text: str) -> str:
    """The kind of a disturbance, without its numbers."""
    words = ("virtual machines", "other processes", "CPU quota", "hot")
    names = ("time taken by other virtual machines", "load of other processes", "a CPU quota", "heat")
    return next(name for word, name in zip(words, names, strict=True) if word in text)


def progress_text(comparison: ComparisonResult, limits: ComparisonLimits) -> str:
    """What a comparison is doing now, in one line."""
    side = escaped(comparison.sides[comparison.next_side].label)
    if len(comparison.warm_up) < len(comparison.sides):
        return f"first launches, which do not count: {side}"
    number = len(comparison.rounds) + 1
    found = ""
    if comparison.estimates:
        each = comparison.estimates[0]
        interval = "" if each.low is None else f" ({ratio_text(each, each.low)}-{ratio_text(each, each.high)})"
        found = f", so far {ratio_text(each)}{interval}"
    return f"round {number} of at most {limits.rounds}{found}: {side}"
