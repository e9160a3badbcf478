"""The formats of `--emit`: which of them writes a plan."""

from collections.abc import Collection

from cpulaunch.emit.kubernetes import k8s_manifest
from cpulaunch.emit.shell import plan_script
from cpulaunch.emit.slurm import slurm_script
from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan


def emitted_text(plan: LaunchPlan, host: Host, command_line: CommandLine, *, hidden: Collection[str] = ()) -> str:
    """The plan in the format that the command line names. `hidden`: variables whose values are left out.

    Raises: UsageError.
    """
    if command_line.emit == "slurm":
        return slurm_script(plan, host, command_line, hidden=hidden)
    if command_line.emit == "k8s":
        return k8s_manifest(plan, host, command_line, hidden=hidden)
    return plan_script(plan, hidden=hidden)
