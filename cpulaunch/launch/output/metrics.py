"""Metrics in the workers' output: the last number that a pattern finds, named after the pattern."""

from __future__ import annotations

import math
import re

from cpulaunch.records.plan import LARGEST_METRIC
from cpulaunch.system.time_limit import OutOfTimeError, cpu_time_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LINE_BYTES = 1 << 16
"""Only the end of a longer line is searched."""

SEARCH_SECONDS = 0.5
"""CPU time for the lines of one read; a pattern such as (a+)+b could take longer than the machine lives."""
MOST_SKIPPED = 2
"""A worker's output is searched no more after this many lines that took too long."""

DEFAULT_NAME = "metric"
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<|\(\?|\(|\)", re.DOTALL)
"""Tokens to find a group by: parentheses do not count inside escapes and character classes."""

FLAGS = re.compile(r"^\(\?[aiLmsux]+\)")
UNIT_END = re.compile(r"[,;]")
TRIMMED = re.compile(r"(?:\\s|\\b|(?<!\0)[.\s])[*+?]?\??|(?<!\0)[\^$]")
SPECIAL = re.compile(r"[.*+?^$|()\[\]{}\\]")


class Metric:
    """`value`: the last number that the pattern's group matched in one worker's output; None if there is none yet, or
    it is infinite, NaN or beyond LARGEST_METRIC: of a loss that has diverged, what it was before says nothing.

    `rejected`: the last match that is no such number. `skipped`: lines that took the pattern too long.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self.value: float | None = None
        self.rejected: str | None = None
        self.skipped = 0

    @property
    def abandoned(self) -> bool:
        """Whether the output is searched no more. `value` is None then: a later line may have had another one."""
        return self.skipped >= MOST_SKIPPED

    def search(self, lines: Sequence[bytes]) -> None:
        """Effect: `value` becomes the last number in these lines, which are in the order of output."""
        distinct = dict.fromkeys(line for line in reversed(lines) if line)  # Of short lines, many are the same.
        left = list(distinct)[::-1]
        while left and not self.abandoned:
            try:
                with cpu_time_limit(SEARCH_SECONDS):
                    self._search_from_last(left)
            except (OutOfTimeError, MemoryError, RecursionError):  # The last one: another process floods with signals.
                self.skipped += 1
                left = left[:-1]
        if self.abandoned:
            self.value = None

    def _search_from_last(self, left: list[bytes]) -> None:
        """Effect: removes lines from the end until one has a number, and then all."""
        while left:
            matches = self._pattern.findall(left[-1].decode(errors="replace"))
            if any(self._accept(text) for text in reversed(matches)):
                left.clear()
            else:
                left.pop()

    def _accept(self, text: str) -> bool:
        """Whether the text is a number. Effect: `value` becomes that number, None of one that is no measurement."""
        try:
            number = float(text)
        except ValueError:
            self.rejected = text
            return False
        self.value = number if abs(number) <= LARGEST_METRIC else None
        self.rejected = text if self.value is None else self.rejected
        return True


class LineReader:
    """Cuts one stream of a worker into lines for its metric.

    A line ends at \\r too: a progress bar redraws its line after it, and each state counts as a line.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Effect: searches the lines that are complete now."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            first, *lines = data[:end].splitlines()
            self._metric.search([(self._partial + first)[-LINE_BYTES:], *lines])
            self._partial = data[end:]
        else:
            self._partial = (self._partial + data)[-LINE_BYTES:]

    def finish(self) -> None:
        """Effect: searches the last line too, which lacks its newline."""
        self._metric.search([self._partial])
        self._partial = b""


def metric_name(pattern: str) -> str:
    """The name of a pattern's metric: the plain text before its group, else the text after it, else "metric".

    "samples/s: ([0-9.]+)" is named samples/s, and r"([0-9.]+)\\s*images/s" is named images/s.
    """
    text = FLAGS.sub("", pattern)
    start, end = _group(text)
    return _plain(text[:start]) or _plain(text[end:]) or DEFAULT_NAME


def metric_unit(pattern: str) -> str:
    """The plain text behind a pattern's group up to a comma, where units stand; empty if there is none."""
    return _plain(UNIT_END.split(pattern[_group(pattern)[1] :])[0])


def _group(pattern: str) -> tuple[int, int]:
    """The start and end of the pattern's only capturing group."""
    opened: list[re.Match[str]] = []
    for token in TOKEN.finditer(pattern):
        if token[0].startswith("("):
            opened.append(token)
        elif token[0] == ")" and opened and (begin := opened.pop())[0] != "(?":
            return begin.start(), token.end()
    return 0, 0


def _plain(part: str) -> str:
    """The only text that part of a pattern matches; empty if it matches several."""
    escaped = re.sub(r"\\([^A-Za-z0-9])", "\0\\1", part)
    text = TRIMMED.sub(" ", escaped)
    if SPECIAL.search(re.sub(r"\0.", "", text)):
        return ""
    return " ".join(text.replace("\0", "").split()).strip(" :=,;|[(")


def totals(workers: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, tuple[float | None, ...]]]:
    """By name: the sum over the workers that have this metric, and each worker's value (None: it has none)."""
    each = list(workers)
    names = dict.fromkeys(name for metrics in each for name in metrics)
    return {
        name: (
            math.fsum(metrics[name] for metrics in each if name in metrics),
            tuple(metrics.get(name) for metrics in each),
        )
        for name in names
    }


MAX_TERMS = 8
MOST_WRITTEN = 1e15
"""Numbers from this one on are written with an exponent."""


def metric_line(name: str, total: float, values: Iterable[float | None]) -> str:
    """A metric as a line of text: "samples/s: 37.5 (18.9 + 18.6)"; for more workers, the range of their values."""
    each = [value for value in values if value is not None]
    if len(each) == 1:
        return f"{name}: {short_number(total)}"
    if len(each) <= MAX_TERMS:
        return f"{name}: {short_number(total)} ({' + '.join(map(short_number, each))})"
    return (
        f"{name}: {short_number(total)} ({len(each)} workers, {short_number(min(each))} to {short_number(max(each))})"
    )


def short_number(number: float) -> str:
    """The number with at most four significant digits, or with all up to 15 before the point: "18.93", "12835"."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(number))))
    if decimals > 9 or abs(number) >= MOST_WRITTEN:
        return f"{number:.4g}"
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
