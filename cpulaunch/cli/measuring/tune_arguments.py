"""The command line of `tune`: its own options among those of a launch, and the program."""

from __future__ import annotations

import re

from cpulaunch.cli.help.measuring import TUNE
from cpulaunch.cli.measuring.outputs import OutputFiles, output_files
from cpulaunch.cli.measuring.own_options import OwnOptions, check_exclusive, direction, metric_choice, number
from cpulaunch.measure.samples import MetricChoice
from cpulaunch.measure.tuning.space import parse_fixed, parse_variation
from cpulaunch.measure.tuning.tuner import LATENCY_METRIC, TuneGoal, TuneLimits
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from cpulaunch.system.files.special import FileId

USAGE = "cpulaunch tune [OPTIONS] SCRIPT [ARGS...]"
OWN = OwnOptions("tune", TUNE)
REPEATED = ("--vary", "--fix")
EXCLUSIVE = (
    ("--dist", "--throughput"),
    ("--dist", "--latency"),
    ("--dist", "--rate"),
    ("--latency", "--throughput"),
    ("--latency", "--wall-time"),
    ("--rate", "--throughput"),
    ("--rate", "--wall-time"),
)
PROGRAM_KINDS = {"-m": "-m", "--module": "-m", "--no-python": "--no-python"}
MOST_TRIALS, MOST_MINUTES = 10_000, 10_000
NAME = re.compile(r"[\w.-]+")


@record
class TuneLine:
    """A parsed command line. `options`: those of all launches. `program`: as samples take it, `-m` before a module.

    `save`: the profile's name or path; None: by the script's name. `saves_directly`: a pipe or device there.
    """

    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    goal: TuneGoal = field(default_factory=TuneGoal)
    limits: TuneLimits = field(default_factory=TuneLimits)
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    output: str | None = None
    save: str | None = None
    saves_directly: FileId | None = None
    fresh: bool = False
    files: OutputFiles = field(default_factory=OutputFiles)
    json: bool = False
    help: bool = False


@record
class _Words:
    """A command line in its parts. `given`: own options; `repeated`: all values of those that may be repeated."""

    given: Mapping[str, str]
    repeated: Mapping[str, tuple[str, ...]]
    options: tuple[str, ...]
    program: tuple[str, ...]


def parse_tune(tokens: Sequence[str], value_count: Callable[[str], int | None]) -> TuneLine:
    """The command line behind the word `tune`. Raises: UsageError.

    `value_count`: how many values follow an option of a launch; None if there is no such option.
    """
    words = _read(tokens, value_count)
    given = words.given
    if "--help" in given:
        return TuneLine(help=True)
    check_exclusive(given)
    for pair in EXCLUSIVE:
        if given.keys() >= set(pair):
            raise UsageError(f"{' and '.join(pair)} exclude each other", hint="give one of them")
    if not words.program:
        raise UsageError("no script given", hint=USAGE)
    return TuneLine(
        options=words.options,
        program=words.program,
        goal=_goal(given),
        limits=_limits(given),
        vary={name: values for text in words.repeated["--vary"] for name, values in parse_variation(text).items()},
        fixed=frozenset(name for text in words.repeated["--fix"] for name in parse_fixed(text)),
        output=given.get("--output"),
        save=_save(given.get("--save")),
        fresh="--fresh" in given,
        files=output_files(given),
        json="--json" in given,
    )


def _read(tokens: Sequence[str], value_count: Callable[[str], int | None]) -> _Words:
    given: dict[str, str] = {}
    repeated: dict[str, list[str]] = {name: [] for name in REPEATED}
    options: list[str] = []
    kind: list[str] = []
    left = list(tokens)
    while left and left[0].startswith("-") and left[0] != "-" and "--help" not in given:
        token = left.pop(0)
        if token == "--":
            break
        name, equals, text = token.partition("=")
        flag = OWN.short.get(name, "--" + name[2:].replace("_", "-") if name.startswith("--") else name)
        if flag in PROGRAM_KINDS and equals:
            raise UsageError(f"{flag} takes no value", value=text, hint=f"cpulaunch tune {flag} {text}")
        if flag in PROGRAM_KINDS:
            kind = [PROGRAM_KINDS[flag]]
        elif flag in OWN.values:
            value = OWN.value(flag, text if equals else None, left)
            given[flag] = value
            if flag in REPEATED:
                repeated[flag].append(value)
        else:
            options.append(token)
            if not equals and value_count(name) == 1 and left:
                options.append(left.pop(0))
    program = (*kind, *left) if left else ()
    return _Words(
        given=given,
        repeated={name: tuple(values) for name, values in repeated.items()},
        options=tuple(options),
        program=program,
    )


def asks_for_json(tokens: Sequence[str], value_count: Callable[[str], int | None]) -> bool:
    """Whether --json is among the options, also of a command line that is wrong."""
    try:
        return "--json" in _read(tokens, value_count).given
    except UsageError:
        return "--json" in tokens


def _goal(given: Mapping[str, str]) -> TuneGoal:
    lower = direction(given)
    max_error = None
    if "--max-error" in given:
        max_error = number(given["--max-error"])
        if max_error is None or not 0 <= max_error <= 1:
            raise OWN.invalid("--max-error", given["--max-error"], "a relative error from 0 to 1, such as 0.01")
    rate = None
    if "--rate" in given:
        rate = number(given["--rate"])
        if rate is None or rate <= 0:
            raise OWN.invalid("--rate", given["--rate"], "a number of requests per second above 0")
    latency = "--latency" in given or rate is not None
    choice = metric_choice(given, lower)
    return TuneGoal(
        choice=MetricChoice(name=LATENCY_METRIC) if latency and choice is None else choice,
        lower=lower,
        max_error=max_error,
        throughput="--throughput" in given,
        ranks="--dist" in given,
        latency=latency,
        rate=rate,
    )


def _limits(given: Mapping[str, str]) -> TuneLimits:
    defaults = TuneLimits()
    seconds, launch = defaults.seconds, defaults.launch_seconds
    if "--minutes" in given:
        minutes = number(given["--minutes"])
        if minutes is None or not 0 < minutes <= MOST_MINUTES:
            raise OWN.invalid("--minutes", given["--minutes"], f"a number above 0, at most {MOST_MINUTES}")
        seconds = 60 * minutes
    if "--timeout" in given:
        launch = number(given["--timeout"])
        if launch is None or launch <= 0:
            raise OWN.invalid("--timeout", given["--timeout"], "a number of seconds above 0")
    return TuneLimits(trials=_trials(given, defaults.trials), seconds=seconds, launch_seconds=launch)


def _trials(given: Mapping[str, str], default: int) -> int:
    text = given.get("--trials")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 5 or not 1 <= int(text) <= MOST_TRIALS:
        raise OWN.invalid("--trials", text, f"a whole number from 1 to {MOST_TRIALS}")
    return int(text)


def _save(text: str | None) -> str | None:
    if text is None or "/" in text or text.endswith(".toml"):
        return text
    if not NAME.fullmatch(text) or text in ("auto", "none", ".", ".."):
        raise OWN.invalid("--save", text, "the name of a profile, or a path that ends in .toml")
    return text
