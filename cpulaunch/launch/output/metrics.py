"""Metrics in the workers' output: the last number that a pattern finds, named after the pattern."""

from __future__ import annotations

import math
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LINE_BYTES = 1 << 16
"""Only the end of a longer line is searched."""

BREAKS = re.compile(rb"[\r\n]+")
"""\\r too: a progress bar redraws its line after it, and each state counts as a line."""

DEFAULT_NAME = "metric"
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<|\(\?|\(|\)", re.DOTALL)
"""Tokens to find a group by: parentheses do not count inside escapes and character classes."""

TRIMMED = re.compile(r"(?:\\s|\\b|(?<!\0)[.\s])[*+?]?\??|(?<!\0)[\^$]")
SPECIAL = re.compile(r"[.*+?^$|()\[\]{}\\]")


class Metric:
    """`value`: the last number that the pattern's group matched in one worker's output; None if there is none yet.

    `rejected`: the last match that is not a finite number.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self.value: float | None = None
        self.rejected: str | None = None

    def search(self, lines: Iterable[bytes]) -> None:
        """Effect: `value` becomes the last number in these lines, which are in the order of output."""
        for line in reversed(list(lines)):
            matches = self._pattern.findall(line.decode(errors="replace"))
            for text in reversed(matches):
                if self._accept(text):
                    return

    def _accept(self, text: str) -> bool:
        number = _number(text)
        if number is None:
            self.rejected = text
            return False
        self.value = number
        return True


def _number(text: str) -> float | None:
    """The finite number that the text stands for; None if it stands for none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class LineReader:
    """Cuts one stream of a worker into lines for its metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Effect: searches the lines that are complete now."""
        *lines, self._partial = BREAKS.split(self._partial + data)
        self._partial = self._partial[-LINE_BYTES:]
        self._metric.search(lines)

    def finish(self) -> None:
        """Effect: searches the last line too, which lacks its newline."""
        self._metric.search([self._partial])
        self._partial = b""


def metric_name(pattern: str) -> str:
    """The name of a pattern's metric: the plain text before its group, else the text after it, else "metric".

    "samples/s: ([0-9.]+)" is named samples/s, and r"([0-9.]+)\\s*images/s" is named images/s.
    """
    start, end = _group(pattern)
    return _plain(pattern[:start]) or _plain(pattern[end:]) or DEFAULT_NAME


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
    """The number with at most four significant digits, or with all digits before the point: "18.93", "12835"."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(number))))
    if decimals > 9:
        return f"{number:.4g}"
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
