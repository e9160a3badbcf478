"""The command line of `compare`: its options, the sides, and the program."""

from __future__ import annotations

import shlex

from cpulaunch.cli.help.measuring import COMPARE
from cpulaunch.cli.measuring.outputs import OutputFiles, output_files
from cpulaunch.cli.measuring.own_options import (
    OwnOptions,
    check_exclusive,
    direction,
    metric_choice,
    number,
    shown_words,
)
from cpulaunch.measure.comparison import ComparisonLimits
from cpulaunch.measure.statistics import MOST_ROUNDS
from cpulaunch.records.errors import UsageError, quoted
from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cpulaunch.measure.samples import MetricChoice

USAGE = "cpulaunch compare 'OPTIONS A' 'OPTIONS B' -- SCRIPT [ARGS...]"
PLAIN, DEFAULTS = "python", "cpulaunch"
"""Words for a side: Python alone, and cpulaunch without options."""
BEGINS_PROGRAM = frozenset({"-m", "--module", "--no-python"})
"""Words in front of a program, as in a launch."""
OWN = OwnOptions("compare", COMPARE)


@record
class CompareLine:
    """A parsed command line. `sides`: the words of each; None stands for Python alone. `choice` None: found later."""

    sides: tuple[tuple[str, ...] | None, ...] = ()
    program: tuple[str, ...] = ()
    choice: MetricChoice | None = None
    lower_is_better: bool | None = None
    limits: ComparisonLimits = field(default_factory=ComparisonLimits)
    files: OutputFiles = field(default_factory=OutputFiles)
    json: bool = False
    fail_if_slower: bool = False
    help: bool = False


def parse_compare(tokens: Sequence[str]) -> CompareLine:
    """The command line behind the word `compare`. Raises: UsageError."""
    given, rest = OWN.leading(tokens)
    if "--help" in given:
        return CompareLine(help=True)
    before, program = _sides_and_program(rest)
    sides = _sides(before, given)
    if "--help" in given:
        return CompareLine(help=True)
    check_exclusive(given)
    lower = direction(given)
    return CompareLine(
        sides=tuple(map(_side_words, sides)),
        program=tuple(program),
        choice=metric_choice(given, lower),
        lower_is_better=lower,
        limits=_limits(given),
        files=output_files(given),
        json="--json" in given,
        fail_if_slower="--fail-if-slower" in given,
    )


def asks_for_json(tokens: Sequence[str]) -> bool:
    """Whether --json is among compare's own options, also of a command line that is wrong."""
    given = iter(tokens)
    for token in given:
        flag = token.partition("=")[0]
        if flag == "--json":
            return True
        if token == "--" or not (flag in OWN.values or _is_side(token)):
            return False
        if OWN.values.get(flag) and "=" not in token:
            next(given, None)
    return False


def _sides_and_program(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before the program, none if there are no sides, and the program with its arguments. Raises: UsageError.

    A `--` in front ends the options of compare itself, and stays in front of the sides.
    """
    start = 1 if words[:1] == ["--"] else 0
    divided = "--" in words[start:]
    if start and not divided:
        return [], _checked_program(words[start:])
    begins = words[start:] and (not _is_side(words[start]) or _begins_program(words[start:], own=not start))
    if begins:
        return [], _checked_program(words[start:])
    if not divided:
        what = "no -- between the sides and the program" if words else "no script given"
        raise UsageError(what, value=words[0] if words else None, hint=USAGE)
    at = words.index("--", start)
    return words[:at], _checked_program(words[at + 1 :])


def _sides(words: list[str], given: dict[str, str]) -> list[str]:
    """The sides, python and the defaults if none are given. Raises: UsageError.

    Effect: options of compare itself that stand among the sides are added to `given`.
    """
    sides: list[str] = []
    left = words[1:] if words[:1] == ["--"] else words
    while left:
        if words[:1] != ["--"]:
            found, left = OWN.leading(left)
            given |= found
        sides, left = [*sides, *left[:1]], left[1:]
    strange = next((word for word in sides if not _is_side(word)), None)
    if strange is not None:
        name, equals, _ = strange.partition("=")  # It may be what --env gives to a variable.
        raise UsageError(
            "a side is neither options nor python",
            value=quoted(f"{name}=...") if equals else quoted(strange),
            hint=f"put the options of a side in quotes: {USAGE}",
        )
    return sides if len(sides) > 1 else [PLAIN, *(sides or [DEFAULTS])]


def _is_side(word: str) -> bool:
    return word.startswith("-") or word.strip() in ("", PLAIN, DEFAULTS)


def _checked_program(program: list[str]) -> list[str]:
    if BEGINS_PROGRAM.issuperset(program):
        raise UsageError("no script given", hint=USAGE)
    return program


def _begins_program(words: Sequence[str], *, own: bool) -> bool:
    """Whether words are -m MODULE or --no-python COMMAND, whose arguments a `--` belongs to, rather than sides.

    `own`: options of compare itself may stand among sides.
    """
    if words[0] not in BEGINS_PROGRAM or "--" not in words:
        return words[0] in BEGINS_PROGRAM
    left = list(words[: words.index("--")])
    while left and _is_side(left[0]):
        left = OWN.leading(left[1:])[1] if own else left[1:]
    return bool(left)


def _side_words(text: str) -> tuple[str, ...] | None:
    if text.strip() == PLAIN:
        return None
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError("a side cannot be split into words", value=error, hint="check its quotes") from None
    return () if words == [DEFAULTS] else tuple(words)


def _limits(given: Mapping[str, str]) -> ComparisonLimits:
    defaults = ComparisonLimits()
    return ComparisonLimits(
        until=_percent(given["--until"]) if "--until" in given else defaults.until,
        rounds=_whole(given["--rounds"]) if "--rounds" in given else defaults.rounds,
        budget_seconds=_seconds(given["--budget"]) if "--budget" in given else defaults.budget_seconds,
    )


def _percent(text: str) -> float:
    value = number(text.removesuffix("%"))
    if value is None or not text.endswith("%") or not 0 <= value < 100:
        raise OWN.invalid("--until", text, "a percentage such as 2%; with 0%, all rounds are run")
    return value / 100


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 4 or not 1 <= int(text) <= MOST_ROUNDS:
        raise OWN.invalid("--rounds", text, f"a whole number from 1 to {MOST_ROUNDS}")
    return int(text)


def _seconds(text: str) -> float:
    value = number(text)
    if value is None or value <= 0:
        raise OWN.invalid("--budget", text, "a number of seconds above 0")
    return value


def side_labels(sides: Iterable[tuple[str, ...] | None], hidden: Iterable[frozenset[str]]) -> list[str]:
    """What each side is called: its options, without the values of variables that are hidden, and a number if equal."""
    labels: list[str] = []
    for words, names in zip(sides, hidden, strict=True):
        label = PLAIN if words is None else shlex.join(shown_words(words, names)) or DEFAULTS
        count = sum(each.partition(" #")[0] == label for each in labels)
        labels.append(f"{label} #{count + 1}" if count else label)
    return labels
