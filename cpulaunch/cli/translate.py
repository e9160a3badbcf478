"""The command translate: prints what another launcher's command line is in cpulaunch, and starts nothing."""

from __future__ import annotations

import shlex

from cpulaunch.cli import terminal
from cpulaunch.cli.arguments import canonical, value_count
from cpulaunch.cli.corrections.shell_words import ShellWords, shell_words
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
    given = shell_words(arguments[0]) if len(arguments) == 1 else ShellWords(tuple(arguments))
    if not given.words:
        raise UsageError("no command line to translate", hint=USAGE)
    found = translation(given.words, canonical=canonical, values=value_count)
    replaced = tuple(f"{text} is left as it is: replace it, or take it out of the quotes" for text in given.replaced)
    for note in (*found.notes, *replaced):
        terminal.notify(note, environ)
    terminal.print_text(shlex.join(("cpulaunch", *found.words)))
    return 0
