"""The result of a search as a profile: its settings, each with a reason, and where they were measured."""

from __future__ import annotations

import json
import os
import re

from cpulaunch.measure.tuning.identity import content_digest
from cpulaunch.measure.tuning.space import value_text
from cpulaunch.records.settings import setting_specs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from cpulaunch.measure.tuning.space import Configuration

MAX_TEXT = 400
DIGITS = 8
"""Of an arguments' digest: too few to test guesses of a password."""
MAX_NAME = 60
NO_NAME = re.compile(r"[^\w.-]+")


def in_profile(configuration: Configuration) -> Configuration:
    """The settings that a profile may have; the others belong on the command line."""
    specs = setting_specs()
    return {name: value for name, value in configuration.items() if specs[name].in_profile}


def on_command_line(configuration: Configuration) -> Configuration:
    """The settings of a configuration that no profile may have."""
    return {name: value for name, value in configuration.items() if not setting_specs()[name].in_profile}


def profile_name(target: str) -> str:
    """The name of a profile for a program: a name that --profile takes, whatever the file's name is."""
    stem = NO_NAME.sub("-", os.path.splitext(os.path.basename(target))[0])[:MAX_NAME].strip("-.")
    return f"{stem or 'program'}-tuned"


def shown_program(program: Sequence[str]) -> str:
    """The script's path, the module or the command, without its arguments: they may have passwords and tokens."""
    kind, target, _ = _split(program)
    return target if kind else os.path.abspath(target)


def arguments_digest(program: Sequence[str]) -> str:
    """What stands for the arguments of a program; empty if it has none."""
    arguments = _split(program)[2]
    return content_digest("\0".join(arguments).encode(errors="surrogateescape"))[:DIGITS] if arguments else ""


def _split(program: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """The option before a module or a command, empty for a script; the target; its arguments."""
    kind = program[0] if program[0] in ("-m", "--no-python") else ""
    words = tuple(program[1:] if kind else program)
    return kind, words[0], words[1:]


def profile_text(
    configuration: Configuration, *, summary: str, reason: str, provenance: Mapping[str, str], date: str
) -> str:
    """The TOML text of a profile. `reason`: of each setting; `date`: of the measurement, as ISO text."""
    lines = ['kind = "intent"', f"summary = {_quoted(summary)}", "", "[provenance]"]
    lines += [f"{name} = {_quoted(text)}" for name, text in provenance.items() if text]
    lines += [f"date = {date}"]
    for name, value in in_profile(configuration).items():
        lines += ["", f"[settings.{name}]", f"value = {_toml(name, value)}", f"reason = {_quoted(reason)}"]
        lines += ['source = "measured: cpulaunch tune"', f"date = {date}"]
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """A TOML string of one printable line."""
    return json.dumps(one_line(text), ensure_ascii=False)


def one_line(text: str) -> str:
    """The text as a profile has it: printable, and not longer than MAX_TEXT."""
    line = "".join(each if each.isprintable() else "?" for each in text)
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 3]}..."


def _toml(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    return _quoted(value_text(name, value))
