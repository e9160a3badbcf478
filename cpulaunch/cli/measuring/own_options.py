"""What the measuring commands share in reading their command lines."""

from __future__ import annotations

import math

from cpulaunch.launch.output.metrics import metric_name, metric_unit
from cpulaunch.measure.metric_choice import requested_choice
from cpulaunch.measure.samples import MetricChoice
from cpulaunch.records.errors import UsageError, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cpulaunch.cli.help.options import Option

MAX_METRIC = 1000
EXCLUSIVE = (("--metric", "--wall-time"), ("--lower-is-better", "--higher-is-better"))


class OwnOptions:
    """The options of a measuring command itself. `values`: by name, the metavar of the value, empty for a switch."""

    def __init__(self, command: str, rows: Iterable[Option]) -> None:
        rows = tuple(rows)
        self.command = command
        self.values = {row.shown: row.metavar for row in rows}
        self.short = {name: row.shown for row in rows for name in row.short}

    def value(self, flag: str, inline: str | None, left: list[str]) -> str:
        """The value of an option, empty for a switch. Effect: takes it from the words. Raises: UsageError."""
        if not self.values[flag]:
            if inline is not None:
                raise UsageError(f"{flag} takes no value", value=inline, hint=f"cpulaunch {self.command} {flag}")
            if flag == "--json" and left and left[0].endswith(".json") and not left[0].startswith("-"):
                hint = "it writes to the standard output, which > FILE redirects"
                raise UsageError("--json takes no file", value=left[0], hint=hint)
            return ""
        if inline is not None:
            return inline
        if not left:
            raise UsageError(f"{flag} needs a value", hint=f"{flag} {self.values[flag]}")
        return left.pop(0)

    def leading(self, tokens: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """The options that the tokens begin with, and what follows them. Raises: UsageError."""
        given: dict[str, str] = {}
        left = list(tokens)
        while left:
            name, equals, text = left[0].partition("=")
            flag = self.short.get(name, name)
            if flag not in self.values:
                break
            del left[0]
            given[flag] = self.value(flag, text if equals else None, left)
        return given, left

    def invalid(self, flag: str, text: str, expected: str) -> UsageError:
        """The error of a value that the option does not take."""
        return UsageError(
            f"invalid value {quoted(text)} for {flag}",
            value=f"expected {expected}",
            hint=f"{flag} {self.values[flag]}",
        )


def check_exclusive(given: Mapping[str, object]) -> None:
    """Raises: UsageError if options ask for different things at once."""
    for pair in EXCLUSIVE:
        if given.keys() >= set(pair):
            raise UsageError(f"{' and '.join(pair)} exclude each other", hint="give one of them")


def direction(given: Mapping[str, object]) -> bool | None:
    """Whether less of the metric is better; None: by its name."""
    return True if "--lower-is-better" in given else False if "--higher-is-better" in given else None


def metric_choice(given: Mapping[str, str], lower: bool | None) -> MetricChoice | None:
    """The figure that the options choose; None: the first one that the program reports. Raises: UsageError."""
    if "--wall-time" in given:
        return MetricChoice(lower_is_better=True if lower is None else lower)
    text = given.get("--metric")
    if text is None:
        return None
    if not text.strip() or len(text) > MAX_METRIC:
        raise UsageError("invalid value for --metric", value=quoted(text), hint="--metric NAME|REGEX")
    return requested_choice(text, shown_name=metric_name(text), lower=lower, unit=metric_unit(text))


def number(text: str) -> float | None:
    """The finite number in a text; None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def shown_words(words: Sequence[str], names: frozenset[str]) -> list[str]:
    """The words without the values that --env gives to these variables."""
    shown = []
    for word, previous in zip(words, ["", *words], strict=False):
        start = "--env=" if word.startswith("--env=") else ""
        name, equals, _ = word.removeprefix(start).partition("=")
        given = equals and (start or previous == "--env") and name in names
        shown.append(f"{start}{name}=..." if given else word)
    return shown
