"""The help of run and plan, made from the settings that are parsed."""

from __future__ import annotations

from cpulaunch.cli.arguments import SWITCHES, TEXT_OPTIONS
from cpulaunch.records.settings import setting_specs
from cpulaunch.records.value_types import SettingSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

INTRODUCTION = """\
Usage: cpulaunch [OPTIONS] SCRIPT [ARGS...]
       cpulaunch [OPTIONS] -m MODULE [ARGS...]
       cpulaunch [OPTIONS] --no-python PROGRAM [ARGS...]
       cpulaunch COMMAND ...

Run an unmodified PyTorch program on the right cores and memory, and explain
every choice. Options for your script go after the script name. Each switch has
a negative form: --no-smt overrides smt = true in a profile. An option under
"Distributed" (except --device and --scheduler) makes the launch a job of ranks;
PET_* variables are read as by torchrun.

Commands:
  run         run a program (the default)
  torchrun    run a job of ranks with torchrun's options; one rank by default
  plan        print what run would do, and why; start nothing
  probe       show this machine: cores, caches, NUMA nodes, limits, libraries
  profiles    list, show or validate profiles
  translate   print what another launcher's command line is in cpulaunch
  doctor      check this machine and its Python environment
"""
INDENT = 28


def run_help(width: int) -> str:
    """The help text, wrapped to `width` columns."""
    lines = [INTRODUCTION.rstrip()]
    group = ""
    for spec in setting_specs().values():
        if spec.group != group:
            group = spec.group
            lines += ["", f"{group}:"]
        lines += _entry(_label(spec), _description(spec), width)
    lines += ["", "Program, plan and help:"]
    for flag, (metavar, text) in TEXT_OPTIONS.items():
        lines += _entry(f"{flag} {metavar}", text, width)
    for flag, text in SWITCHES.items():
        lines += _entry(flag, text, width)
    return "\n".join(lines) + "\n"


def _label(spec: SettingSpec) -> str:
    """The option as it is typed to change the default."""
    if spec.value_type.flag:
        return spec.negative_flag if spec.default else spec.flag
    return f"{spec.flag} {spec.value_type.metavar}"


def _description(spec: SettingSpec) -> str:
    """The help text with the default behind its first line, unless the text names it."""
    if not spec.default or spec.value_type.flag or "(default:" in spec.help:
        return spec.help
    first, *others = spec.help.split("\n")
    return "\n".join([f"{first} (default: {spec.value_type.to_text(spec.default)})", *others])


def _entry(label: str, text: str, width: int) -> Iterator[str]:
    """The lines of one option: the label, and beside or below it the wrapped text."""
    import textwrap

    first = f"  {label}"
    if len(first) > INDENT - 2:
        yield first
        first = ""
    body = [
        line
        for part in text.split("\n")
        for line in textwrap.wrap(part, max(width - INDENT, 30), break_on_hyphens=False)
    ]
    yield first.ljust(INDENT) + body[0]
    yield from (" " * INDENT + line for line in body[1:])
