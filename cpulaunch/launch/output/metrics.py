"""Figures in the workers' output: the last number a pattern finds counts, under a name made from the pattern."""

from __future__ import annotations

import math
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LINE_BYTES = 1 << 16
"""Of a longer line, only its end is searched."""

BREAKS = re.compile(rb"[\r\n]+")
"""A progress bar redraws its line after \\r: each state is a line of its own."""

NAMELESS = "metric"
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<|\(\?|\(|\)", re.DOTALL)
"""What matters for finding a group: escapes and character classes hide the parentheses in them."""

TRIMMED = re.compile(r"(?:\\s|\\b|(?<!\0)[.\s])[*+?]?\??|(?<!\0)[\^$]")
SPECIAL = re.compile(r"[.*+?^$|()\[\]{}\\]")


class Metric:
    """The last number that the pattern's group held in one worker's output (None: none yet).

    `refused` is the last text there that was no finite number.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self.value: float | None = None
        self.refused: str | None = None

    def take(self, lines: Iterable[bytes]) -> None:
        """Effect: the last figure in these lines, which came in this order, counts."""
        for line in reversed(list(lines)):
            matches = self._pattern.findall(line.decode(errors="replace"))
            for text in reversed(matches):
                if self._counts(text):
                    return

    def _counts(self, text: str) -> bool:
        number = _number(text)
        if number is None:
            self.refused = text
            return False
        self.value = number
        return True


def _number(text: str) -> float | None:
    """The finite number written so; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class LineReader:
    """One stream of a worker, cut into lines for its figure."""

    def __init__(self, metric: Metric) -> None:
        self._figure = metric
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Effect: the lines that are complete now are searched."""
        *lines, self._rest = BREAKS.split(self._rest + data)
        self._rest = self._rest[-LINE_BYTES:]
        self._figure.take(lines)

    def finish(self) -> None:
        """Effect: the last line, which lacks its newline, is searched too."""
        self._figure.take([self._rest])
        self._rest = b""


def metric_name(pattern: str) -> str:
    """What a pattern's figure is called: the plain text before its group, else that after it, else "metric".

    "samples/s: ([0-9.]+)" is samples/s, r"([0-9.]+)\\s*images/s" images/s.
    """
    start, end = _group(pattern)
    return _plain(pattern[:start]) or _plain(pattern[end:]) or NAMELESS


def _group(pattern: str) -> tuple[int, int]:
    """Where the pattern's one capturing group begins and ends."""
    opened: list[re.Match[str]] = []
    for token in TOKEN.finditer(pattern):
        if token[0].startswith("("):
            opened.append(token)
        elif token[0] == ")" and opened and (begin := opened.pop())[0] != "(?":
            return begin.start(), token.end()
    return 0, 0


def _plain(part: str) -> str:
    """The text a part of a pattern stands for; empty if it is not one text."""
    escaped = re.sub(r"\\([^A-Za-z0-9])", "\0\\1", part)
    text = TRIMMED.sub(" ", escaped)
    if SPECIAL.search(re.sub(r"\0.", "", text)):
        return ""
    return " ".join(text.replace("\0", "").split()).strip(" :=,;|[(")


def totals(workers: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, tuple[float | None, ...]]]:
    """Each figure's sum over the workers that have it, and its value for each worker (None: it has none)."""
    each = list(workers)
    names = dict.fromkeys(name for metrics in each for name in metrics)
    return {
        name: (math.fsum(metrics[name] for metrics in each if name in metrics), tuple(f.get(name) for f in each))
        for name in names
    }


MOST_TERMS = 8


def metric_line(name: str, total: float, values: Iterable[float | None]) -> str:
    """A figure for a person: "samples/s: 37.5 (18.9 + 18.6)"; the range of many workers' values."""
    each = [value for value in values if value is not None]
    if len(each) == 1:
        return f"{name}: {short(total)}"
    if len(each) <= MOST_TERMS:
        return f"{name}: {short(total)} ({' + '.join(map(short, each))})"
    return f"{name}: {short(total)} ({len(each)} workers, {short(min(each))} to {short(max(each))})"


def short(number: float) -> str:
    """A number in at most four significant digits, unless it is a whole one: "37.5", "18.93", "12835"."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(number))))
    if decimals > 9:
        return f"{number:.4g}"
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
