"""The command translate: prints what another launcher's command line is in cpulaunch, and starts nothing."""

from __future__ import annotations

import shlex

from cpulaunch.cli import terminal
from cpulaunch.cli.arguments import canonical, value_count
from cpulaunch.cli.corrections.translation import translation
from cpulaunch.records.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

USAGE = "cpulaunch translate 'numactl -C 0-3 -m 0 python a.py'"
HELP = f"""\
Usage: cpulaunch translate 'COMMAND LINE'

Print the command line of cpulaunch that does what another launcher's does, and
start nothing: ipexrun, run_cpu, torchrun, numactl, taskset, mpirun, accelerate
launch and deepspeed. What differs is said on stderr. For example:

  {USAGE}
"""


def translate(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of `translate`. Effect: prints the command line. Raises: UsageError if it cannot be translated."""
    if list(arguments[:1]) in (["-h"], ["--help"]):
        terminal.print_text(HELP, end="")
        return 0
    words = _words(arguments)
    if not words:
        raise UsageError("no command line to translate", hint=USAGE)
    found = translation(words, canonical=canonical, values=value_count)
    for note in found.notes:
        terminal.notify(note, environ)
    terminal.print_text(shlex.join(("cpulaunch", *found.words)))
    return 0


def _words(arguments: Sequence[str]) -> list[str]:
    """The words of the command line, which may be one quoted argument. Raises: UsageError if a quote is not closed."""
    if len(arguments) != 1:
        return list(arguments)
    try:
        return shlex.split(arguments[0])
    except ValueError as error:
        raise UsageError("not a command line", value=error, hint=USAGE) from None
