"""The error for all unknown options of a command line at once, each with what was probably meant."""

from __future__ import annotations

import os

from cpulaunch.cli.corrections.foreign_options import EQUIVALENTS, VALUES, Equivalent
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIMILAR = 0.85
"""Only a slip of the finger is as similar; 0.7 takes --auto-ipex for --no-ipex."""
SHORTEST_PREFIX = len("--cor")
FOR_THE_SCRIPT = "options for your script go after the script name"
PROGRAM_SUFFIXES = (".py", ".sh")


@record(kw_only=False)
class TypedOption:
    """An option as typed, its name with dashes, its value, if the next word is one, and the number of the next word."""

    typed: str
    name: str
    value: str | None
    known: bool
    end: int


def unknown_options_error(
    tokens: Sequence[str], *, canonical: Callable[[str], str], values: Callable[[str], int | None], known: Sequence[str]
) -> UsageError:
    """The error that names every unknown option among the tokens before the program.

    `values`: how many values an option of cpulaunch takes; None for a name that is unknown. `known`: all names.
    """
    typed = typed_options(tokens, canonical=canonical, values=values)
    unknown = [option for option in typed if not option.known]
    names = list(dict.fromkeys(option.typed for option in unknown))
    what = "unknown option" if len(names) == 1 else "unknown options"
    return UsageError(what, value=", ".join(names), hint=_hint(unknown, known))


def typed_options(
    tokens: Sequence[str], *, canonical: Callable[[str], str], values: Callable[[str], int | None]
) -> Iterator[TypedOption]:
    """The options before the program, also where some are unknown."""
    position = 0
    while position < len(tokens) and tokens[position].startswith("-") and tokens[position] not in ("-", "--"):
        typed, equals, inline = tokens[position].partition("=")
        name = canonical(typed)
        position += 1
        following = tokens[position : position + 1]
        count = None if name == "--module" and following and _is_cpulist(following[0]) else values(name)
        takes_value = _takes_value(name, tokens[position:]) if count is None else count > 0 and bool(following)
        value = inline if equals else following[0] if takes_value else None
        position += takes_value and not equals
        yield TypedOption(typed, name, value, count is not None, position)


def _takes_value(name: str, rest: Sequence[str]) -> bool:
    """Whether the next word is this option's value and not the program. Of an unknown option that is a guess."""
    if not rest or rest[0].startswith("-"):
        return False
    if name in EQUIVALENTS:
        return EQUIVALENTS[name].values > 0
    if name == "--module":
        return True  # A number: it is numactl's -m.
    return len(rest) > 1 and not rest[0].endswith(PROGRAM_SUFFIXES) and not os.path.exists(rest[0])


def _hint(unknown: Sequence[TypedOption], known: Sequence[str]) -> str:
    """What to type instead of each option, in one line."""
    unknown = _with_level(unknown)
    parts = list(dict.fromkeys(filter(None, (_instead(option, known, alone=len(unknown) == 1) for option in unknown))))
    if not all(each.name in EQUIVALENTS or each.name == "--module" for each in unknown):
        parts += [FOR_THE_SCRIPT] if parts else ["cpulaunch --help all lists all options", FOR_THE_SCRIPT]
    return "; ".join(parts).replace("?;", "?")


def _with_level(unknown: Sequence[TypedOption]) -> list[TypedOption]:
    """The options with `--auto-ipex --dtype bfloat16` as one: together they are one optimization level."""
    dtype = next((option for option in unknown if option.name == "--dtype"), None)
    auto = next((option for option in unknown if option.name == "--auto-ipex"), None)
    if dtype is None or auto is None:
        return list(unknown)
    both = replace(dtype, typed=f"{auto.typed} {dtype.typed}")
    return [both if option is dtype else option for option in unknown if option is not auto]


def _instead(option: TypedOption, known: Sequence[str], *, alone: bool) -> str | None:
    equivalent = EQUIVALENTS.get(option.name)
    if equivalent is not None:
        return _in_cpulaunch(option, equivalent)
    if option.name == "--module":
        return f"{option.typed} {option.value} is --numa-nodes {option.value} --membind bind"
    if names := similar(option.name, known):
        return f"did you mean {' or '.join(names)}{'' if alone else f' for {option.typed}'}?"
    return None


ASSIGNING, ASSIGNMENT = ("-x", "-e"), "NAME=VALUE"
"""Options of other launchers that set a variable, and what is shown for its value, which may be a password."""


def _in_cpulaunch(option: TypedOption, equivalent: Equivalent) -> str:
    """The option of another tool, and what to type for it."""
    given = ASSIGNMENT if option.value and option.name in ASSIGNING else option.value
    value = given or "N"
    typed = option.typed if given is None else f"{option.typed} {given}"
    options = (equivalent.by_value or {}).get(value, equivalent.options)
    if option.name == "-c" and option.value is not None and _is_cpulist(option.value):
        options = "--cpus {value}"
    remark = equivalent.remark.format(value=value)
    if options is None:
        return f"{typed}: {remark}"
    if not options:
        return f"{typed} is not needed{f': {remark}' if remark and not equivalent.by_value else ''}"
    shown = options.format(value=value)
    return f"{typed} is {shown}" + (f" ({remark})" if remark and equivalent.options is not None else "")


def _is_cpulist(text: str) -> bool:
    return text[:1].isdigit() and not text.strip("0123456789,-:")


def similar(name: str, known: Sequence[str]) -> list[str]:
    """At most two options that differ from the name by a slip, or that it abbreviates; none of the opposite meaning."""
    from difflib import get_close_matches

    if not name.startswith("--") or len(name) < SHORTEST_PREFIX:
        return []
    same_sense = [each for each in known if each.startswith("--no-") == name.startswith("--no-")]
    completions = sorted(each for each in same_sense if each.startswith(name))
    if completions:
        return completions if len(completions) < 3 else []
    return get_close_matches(name, same_sense, n=1, cutoff=SIMILAR)


def value_hint(setting: str, flag: str, text: str, choices: Sequence[str]) -> str | None:
    """The hint for a value that another tool has; None if it is none."""
    lower = text.lower()
    word = lower if lower in choices else VALUES.get(setting, {}).get(lower)
    if word is not None:
        return f"{flag} {word}"
    if setting == "membind" and _is_cpulist(text):
        return f"numactl's --membind {text} is --numa-nodes {text} --membind bind"
    return None
