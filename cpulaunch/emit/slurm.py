"""`--emit slurm`: a batch script that starts the plan's job on a Slurm cluster.

Source: man sbatch, man srun (22.05 and later: srun takes --cpus-per-task from its own command line only).
"""

from collections.abc import Collection
from math import ceil
from shlex import join

from cpulaunch.emit.resources import (
    HOST_SETTINGS,
    RENDEZVOUS_SETTINGS,
    ResourceRequest,
    chosen_flags,
    cpulaunch_command,
    job_name,
    required_program,
    resources_of,
)
from cpulaunch.emit.shell_variables import required_variables
from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan

MARGIN_SECONDS = 10
"""Seconds from the end of cpulaunch's grace period to the time limit of the job."""


def slurm_script(plan: LaunchPlan, host: Host, command_line: CommandLine, *, hidden: Collection[str] = ()) -> str:
    """The batch script for sbatch. Raises: UsageError if the plan has no program.

    `hidden`: variables that the job gets from the environment of sbatch, as sbatch's default --export=ALL says.
    """
    program = required_program(command_line, "slurm")
    resources = resources_of(plan, host)
    fewest, most = resources.hosts
    set_by_slurm = (*HOST_SETTINGS, *RENDEZVOUS_SETTINGS)
    without = (*set_by_slurm, "nnodes") if fewest == most > 1 else set_by_slurm
    command = cpulaunch_command(command_line, program, without=without, ranks=plan.job is not None)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{directive}" for directive in _directives(plan, host, resources, name=job_name(program))),
        *_comments(chosen_flags(command_line, set_by_slurm)),
        *(line.rstrip("\n") for line in required_variables(hidden)),
        "",
        # All CPUs of the task, and a host that fails ends the others.
        f"srun --cpus-per-task={resources.cpus} --kill-on-bad-exit=1 \\",
        f"    {join(command)}",
        "",
    ]
    return "\n".join(lines)


def _directives(plan: LaunchPlan, host: Host, resources: ResourceRequest, *, name: str) -> list[str]:
    fewest, most = resources.hosts
    smt = len({cpu.core for cpu in host.cpus}) < len(host.cpus)
    memory = None if resources.memory_mib is None else "0" if resources.whole else f"{resources.memory_mib}M"
    return [
        f"job-name={name}",
        f"nodes={most if fewest == most else f'{fewest}-{most}'}",
        "ntasks-per-node=1",
        f"cpus-per-task={resources.cpus}",
        *(["hint=nomultithread"] if smt and resources.cpus < resources.core_cpus else []),
        *([f"mem={memory}"] if memory is not None else []),
        *([f"gpus-per-node={resources.gpus}"] if resources.gpus else []),
        f"signal=TERM@{ceil(plan.launch.grace_seconds) + MARGIN_SECONDS}",
    ]


def _comments(flags: list[str]) -> list[str]:
    """The comments of the script. `flags`: options that it leaves out because Slurm decides them."""
    return [
        "# Written by cpulaunch: one cpulaunch on each host makes the plan there and starts its ranks or instances.",
        "# CPUs and memory are those of the plan. Add what your cluster needs: --time, --partition, --account.",
        "# cpulaunch must be on the PATH where you call sbatch. mem=0 requests all memory of a host.",
        *([f"# Left to Slurm: {', '.join(flags)}."] if flags else []),
    ]
