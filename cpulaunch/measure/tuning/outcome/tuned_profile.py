"""The result of a search as a profile: its settings, each with a reason, and where they were measured."""

from __future__ import annotations

import json

from cpulaunch.measure.tuning.space import value_text
from cpulaunch.records.settings import setting_specs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from cpulaunch.measure.tuning.space import Configuration

MAX_TEXT = 400


def in_profile(configuration: Configuration) -> Configuration:
    """The settings that a profile may have; the others belong on the command line."""
    specs = setting_specs()
    return {name: value for name, value in configuration.items() if specs[name].in_profile}


def on_command_line(configuration: Configuration) -> Configuration:
    """The settings of a configuration that no profile may have."""
    return {name: value for name, value in configuration.items() if not setting_specs()[name].in_profile}


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
    line = "".join(each if each.isprintable() else "?" for each in text)
    cut = line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 3]}..."
    return json.dumps(cut, ensure_ascii=False)


def _toml(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    return _quoted(value_text(name, value))
