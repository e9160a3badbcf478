"""The command line of `diagnose`: its own options, those of the launch, and the program."""

from __future__ import annotations

from cpulaunch.cli.help.measuring import DIAGNOSE
from cpulaunch.cli.measuring.own_options import OwnOptions
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OWN = OwnOptions("diagnose", DIAGNOSE)
MOST_STEPS = 100_000
COMPARISON = "cpulaunch diagnose --compare BEFORE.json AFTER.json"


@record
class DiagnoseLine:
    """A parsed command line. `launch`: options of the launch and the program. `defaults`: cpulaunch's, without them.

    `compared`: two documents of earlier diagnoses; nothing is launched then.
    """

    launch: tuple[str, ...] = ()
    steps: int = 20
    warm_up: int = 5
    budget_seconds: float = 1800.0
    trace: str | None = None
    html: str | None = None
    compared: tuple[str, str] | None = None
    to_end: bool = False
    defaults: bool = False
    json: bool = False
    help: bool = False


def parse_diagnose(tokens: Sequence[str]) -> DiagnoseLine:
    """The command line behind the word `diagnose`; its own options come first. Raises: UsageError."""
    given, rest = OWN.leading(tokens)
    if "--help" in given:
        return DiagnoseLine(help=True)
    if "--compare" in given:
        return _comparison(given, rest)
    if not rest:
        raise UsageError("no script given", hint="cpulaunch diagnose [OPTIONS] SCRIPT [ARGS...]")
    plain = DiagnoseLine()
    return DiagnoseLine(
        launch=tuple(rest),
        steps=_whole("--steps", given, plain.steps, least=2),
        warm_up=_whole("--warm-up", given, plain.warm_up, least=1),
        budget_seconds=_seconds(given, plain.budget_seconds),
        trace=given.get("--trace"),
        html=given.get("--html"),
        to_end="--to-end" in given,
        defaults="--defaults" in given,
        json="--json" in given,
    )


def _comparison(given: Mapping[str, str], rest: Sequence[str]) -> DiagnoseLine:
    """The command line of a comparison, which launches nothing. Raises: UsageError."""
    other = next((flag for flag in given if flag not in ("--compare", "--json")), None)
    if other is not None:
        raise UsageError(f"--compare launches nothing, and takes no {other}", hint=COMPARISON)
    if len(rest) != 1:
        seen = "no second file" if not rest else " ".join(rest)
        raise UsageError("--compare needs two files that diagnose --json wrote", value=seen, hint=COMPARISON)
    return DiagnoseLine(compared=(given["--compare"], rest[0]), json="--json" in given)


def asks_for_json(tokens: Sequence[str]) -> bool:
    """Whether --json is among diagnose's own options, also of a command line that is wrong."""
    given = iter(tokens)
    for token in given:
        flag = token.partition("=")[0]
        if flag == "--json" or flag not in OWN.values:
            return flag == "--json"
        if OWN.values[flag] and "=" not in token:
            next(given, None)
    return False


def _whole(flag: str, given: Mapping[str, str], default: int, *, least: int) -> int:
    text = given.get(flag)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 6 or not least <= int(text) <= MOST_STEPS:
        raise OWN.invalid(flag, text, f"a whole number from {least} to {MOST_STEPS}")
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
        raise OWN.invalid("--budget", text, "a number of seconds above 0")
    return value
