"""The command line of `diagnose`: its own options, those of the launch, and the program."""

from __future__ import annotations

from cpulaunch.cli.help.measuring import DIAGNOSE
from cpulaunch.records.errors import UsageError, quoted
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VALUES = {row.shown: row.metavar for row in DIAGNOSE}
SHORT = {name: row.shown for row in DIAGNOSE for name in row.short}
MOST_STEPS = 100_000


@record
class DiagnoseLine:
    """A parsed command line. `launch`: options of the launch and the program. `defaults`: cpulaunch's, without them."""

    launch: tuple[str, ...] = ()
    steps: int = 20
    warm_up: int = 5
    budget_seconds: float = 1800.0
    trace: str | None = None
    to_end: bool = False
    defaults: bool = False
    json: bool = False
    help: bool = False


def parse_diagnose(tokens: Sequence[str]) -> DiagnoseLine:
    """The command line behind the word `diagnose`; its own options come first. Raises: UsageError."""
    given, rest = _read_options(tokens)
    if "--help" in given:
        return DiagnoseLine(help=True)
    if not rest:
        raise UsageError("no script given", hint="cpulaunch diagnose [OPTIONS] SCRIPT [ARGS...]")
    plain = DiagnoseLine()
    return DiagnoseLine(
        launch=tuple(rest),
        steps=_whole("--steps", given, plain.steps, least=2),
        warm_up=_whole("--warm-up", given, plain.warm_up, least=1),
        budget_seconds=_seconds(given, plain.budget_seconds),
        trace=given.get("--trace"),
        to_end="--to-end" in given,
        defaults="--defaults" in given,
        json="--json" in given,
    )


def _read_options(tokens: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options of diagnose itself, and what follows them."""
    given: dict[str, str] = {}
    left = list(tokens)
    while left:
        name, equals, text = left[0].partition("=")
        flag = SHORT.get(name, name)
        if flag not in VALUES:
            break
        del left[0]
        if not VALUES[flag] and equals:
            raise UsageError(f"{flag} takes no value", value=text, hint=f"cpulaunch diagnose {flag}")
        if VALUES[flag] and not equals:
            if not left:
                raise UsageError(f"{flag} needs a value", hint=f"{flag} {VALUES[flag]}")
            text = left.pop(0)
        given[flag] = text
    return given, left


def asks_for_json(tokens: Sequence[str]) -> bool:
    """Whether --json is among diagnose's own options, also of a command line that is wrong."""
    given = iter(tokens)
    for token in given:
        flag = token.partition("=")[0]
        if flag == "--json" or flag not in VALUES:
            return flag == "--json"
        if VALUES[flag] and "=" not in token:
            next(given, None)
    return False


def _whole(flag: str, given: Mapping[str, str], default: int, *, least: int) -> int:
    text = given.get(flag)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 6 or not least <= int(text) <= MOST_STEPS:
        raise _invalid(flag, text, f"a whole number from {least} to {MOST_STEPS}")
    return int(text)


def _seconds(given: Mapping[str, str], default: float) -> float:
    text = given.get("--budget")
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise _invalid("--budget", text, "a number of seconds above 0")
    return value


def _invalid(flag: str, text: str, expected: str) -> UsageError:
    return UsageError(
        f"invalid value {quoted(text)} for {flag}", value=f"expected {expected}", hint=f"{flag} {VALUES[flag]}"
    )
