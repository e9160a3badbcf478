"""What the commands of this folder use of `cli`, which imports them: they cannot import it."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from cpulaunch.cli.help.commands import Command
    from cpulaunch.records.command_line import CommandLine
    from cpulaunch.records.host import Host
    from cpulaunch.records.plan import LaunchPlan


@record
class Services:
    """Parsing, planning and printing. `parse`, `resolve` and `check` raise CpulaunchError.

    `parse`: the command line of a launch. `resolve`: that with its program as a launch runs it: a command in PATH, and
    no file of its name that another user put into the current folder. `check`: its plan; nothing is started.
    `host_and_plan`: that with the host it was made for. `levels`: the settings that the optimization levels stand for
    there. `value_count`: how many values follow an option of a launch; None if there is no such option. `notify`:
    prints a message to stderr, or what its reader takes soon: no signal ends a write of a guard and what it waits for.
    """

    environ: Mapping[str, str]
    parse: Callable[[Sequence[str]], CommandLine]
    resolve: Callable[[CommandLine], CommandLine]
    check: Callable[[CommandLine], LaunchPlan]
    host_and_plan: Callable[[CommandLine], tuple[Host, LaunchPlan]]
    levels: Callable[[Host], tuple[Mapping[str, Any], ...]]
    value_count: Callable[[str], int | None]
    print_text: Callable[[str], None]
    print_json: Callable[[Any], None]
    print_help: Callable[[Command], int]
    notify: Callable[[str], bool]
    width: int
    color: bool
