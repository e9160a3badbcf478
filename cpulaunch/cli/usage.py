"""The help of run and plan, made from the same rows that are parsed."""

from collections.abc import Iterable

from cpulaunch.cli.arguments import SWITCHES, TEXTS
from cpulaunch.records.settings import SettingSpec, setting_specs

INTRODUCTION = """\
Usage: cpulaunch [OPTIONS] SCRIPT [ARGS...]
       cpulaunch [OPTIONS] -m MODULE [ARGS...]
       cpulaunch [OPTIONS] --no-python COMMAND [ARGS...]
       cpulaunch COMMAND ...

Runs a PyTorch program, unedited, bound to the right cores and memory, and shows
why. Everything after SCRIPT belongs to it. Switches have an opposite: --no-smt
overrules a profile's smt. Any option of "Distributed" (but --device,
--scheduler, --dist-backend and --ccl-...) makes it a job of ranks; PET_*
variables count as for torchrun.

Commands:
  run         run a program (the default)
  torchrun    run a job of ranks: torchrun's command line, one rank by default
  plan        show what run would do, and why; starts nothing
  probe       show this machine: cores, caches, NUMA nodes, limits, libraries
  profiles    list, show or validate profiles
  doctor      check this machine and environment
"""


def _label(spec: SettingSpec) -> str:
    if spec.value_type.flag:
        return spec.negative_flag if spec.default else spec.flag
    return f"{spec.flag} {spec.value_type.metavar}"


def _explanation(spec: SettingSpec) -> str:
    if spec.value_type.flag or spec.default in (None, ()) or "default" in spec.help.partition("(")[2]:
        return spec.help
    default = ",".join(spec.default) if isinstance(spec.default, tuple) else f"{spec.default}"
    return f"{spec.help} (default: {default})"


def _lines(label: str, text: str, width: int) -> Iterable[str]:
    import textwrap

    indent = 28
    first = f"  {label}"
    if len(first) > indent - 2:
        yield first
        first = ""
    body = textwrap.wrap(text, max(width - indent, 30))
    yield first.ljust(indent) + body[0]
    yield from (" " * indent + line for line in body[1:])


def run_help(width: int) -> str:
    """The help text, wrapped to `width` columns."""
    lines = [INTRODUCTION]
    group = ""
    for spec in setting_specs().values():
        if spec.group != group:
            lines += ([""] if group else []) + [f"{spec.group}:"]
            group = spec.group
        lines += _lines(_label(spec), _explanation(spec), width)
    lines += ["", "Other:"]
    for flag, (metavar, text) in TEXTS.items():
        lines += _lines(f"{flag} {metavar}", text, width)
    for flag, text in SWITCHES.items():
        lines += _lines(flag, text, width)
    return "\n".join(lines) + "\n"
