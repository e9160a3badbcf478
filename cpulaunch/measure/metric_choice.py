"""Which figure of a program is compared, and whether less of it is better. Pure."""

from __future__ import annotations

import math
import re

from cpulaunch.measure.samples import WALL_TIME, MetricChoice
from cpulaunch.records.errors import UsageError, quoted
from cpulaunch.records.torch_settings import OFFERED_LOAD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PER_TIME = re.compile(r"/\s*(s|sec|secs|second|min|minute|h|hour)\b|\bper (second|minute|hour)\b|\b\w*(fps|flops)\b")
"""What is done in a time: more is better."""
TIME_UNITS = frozenset(("s", "sec", "secs", "second", "seconds", "ms", "us", "µs", "ns", "min", "minutes"))
TIME_WORDS = TIME_UNITS | {"time", "latency", "duration", "elapsed", "runtime"}
BYTE_UNITS = frozenset(("bytes", "kb", "mb", "gb", "kib", "mib", "gib"))
AMOUNTS = BYTE_UNITS | {"memory", "rss"}
"""Less of these is better, and several workers need as much as all of them together."""
LESS_IS_BETTER = TIME_WORDS | AMOUNTS | frozenset(("loss", "error", "errors", "perplexity", "load"))
QUALITY = frozenset(("accuracy", "score", "precision", "recall", "f1", "auc", "bleu", "ratio", "percent"))
"""More of these is better, but several workers have no more of it than one."""
PERCENTILE = re.compile(r"p\d\d+")
WORD = re.compile(r"[^\W_]+")
UNIT = re.compile(r"\((?![\d\s]*\))[^()\\.\[\]{}*+?|^$]+\)")
"""A group of a pattern that matches one text alone, which is no number, such as the unit in "latency p99 (ms)"."""


def is_rate_or_time(name: str) -> bool:
    """Whether a metric says how fast something is."""
    return _is_rate(name) or bool(TIME_WORDS & _words(name)) or _has_percentile(name)


def less_is_better(name: str) -> bool:
    """Whether less is better of a metric of this name, by the units and words in it; of an unknown one more is."""
    return not _is_rate(name) and (bool(LESS_IS_BETTER & _words(name)) or _has_percentile(name))


def less_is_better_with(name: str, unit: str) -> bool:
    """Whether less is better of a metric of this name; if that says nothing, by the unit behind its number."""
    if _is_rate(name) or (LESS_IS_BETTER | QUALITY) & _words(name) or _has_percentile(name):
        return less_is_better(name)
    first = WORD.findall(unit.lower())[:1]
    return not _is_rate(unit) and not (TIME_UNITS | BYTE_UNITS).isdisjoint(first)


def of_all_workers(name: str, values: Sequence[float], *, lower: bool | None = None) -> float:
    """The figure of a launch, from those of its workers: the sum of rates and amounts, else the mean.

    `lower`: whether less is better; None: by its name. Of offered loads the largest counts.
    """
    if name == OFFERED_LOAD:
        return max(values)
    words = _words(name)
    less = less_is_better(name) if lower is None else lower
    is_sum = _is_rate(name) or bool(AMOUNTS & words) or not (less or QUALITY & words)
    return math.fsum(values) if is_sum else math.fsum(values) / len(values)


def overload_text(name: str, metrics: Mapping[str, float]) -> str | None:
    """Why this metric of a launch says how long the launch was, in a sentence; None if it does not.

    Of a server that requests reach faster than it serves them, the queue grows to the end, and so do latencies.
    """
    if not is_overloaded(metrics) or "latency" not in _words(name) or not _has_percentile(name):
        return None
    return (
        f"its requests need {metrics[OFFERED_LOAD]:.2f} times the time in which they arrive, so that its queue grows: "
        f"{name!r} depends on how long the run is"
    )


def is_overloaded(metrics: Mapping[str, float]) -> bool:
    """Whether requests arrived faster than they were served."""
    return metrics.get(OFFERED_LOAD, 0.0) >= 1


def _is_rate(name: str) -> bool:
    return PER_TIME.search(name.lower()) is not None


def _has_percentile(name: str) -> bool:
    return any(PERCENTILE.fullmatch(word) for word in _words(name))


def _words(name: str) -> frozenset[str]:
    return frozenset(WORD.findall(name.lower()))


def found_choice(reported: Sequence[Mapping[str, float]], labels: Sequence[str], lower: bool | None) -> MetricChoice:
    """What to compare, given the metrics that each side reported: the first that all have, else the wall time.

    `lower`: whether less is better; None: by its name. Raises: UsageError if sides report different metrics only.
    """
    common = [name for name in reported[0] if all(name in each for each in reported)]
    if not common and any(reported):
        names = "; ".join(f"{label}: {', '.join(each) or 'none'}" for label, each in zip(labels, reported, strict=True))
        raise UsageError(
            "the sides report no metric in common", value=names, hint="--wall-time compares how long they take"
        )
    return named_choice(common[0], lower) if common else MetricChoice(lower_is_better=True)


def named_choice(name: str, lower: bool | None) -> MetricChoice:
    """A metric that the program reports with cpulaunch.metric()."""
    return MetricChoice(name=name, lower_is_better=less_is_better(name) if lower is None else lower)


def requested_choice(text: str, *, shown_name: str, lower: bool | None, unit: str = "") -> MetricChoice:
    """What --metric asks for: a pattern if the text has a group that can match a number, else a metric's name.

    `shown_name`: what the pattern's metric is called; `unit`: the text behind its number.
    Raises: UsageError for a pattern that cannot be one.
    """
    if _is_name(text):
        return named_choice(text, lower)
    try:
        groups = re.compile(text).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"invalid value {quoted(text)} for --metric", value=error, hint="--metric NAME|REGEX"
        ) from None
    if groups != 1:
        raise UsageError(
            f"invalid value {quoted(text)} for --metric",
            value="expected a regular expression with exactly one group, which matches the number",
            hint="--metric 'samples/s: ([0-9.]+)'",
        )
    less = less_is_better_with(shown_name, unit) if lower is None else lower
    return MetricChoice(pattern=text, lower_is_better=less)


def _is_name(text: str) -> bool:
    """Whether a text is a name, in which parentheses hold units only."""
    rest = UNIT.sub("", text)
    return bool(rest.strip()) and "(" not in rest


def choice_name(choice: MetricChoice, *, pattern_name: str) -> str:
    """What the figure is called."""
    return pattern_name if choice.pattern is not None else choice.name or WALL_TIME
