"""`--emit slurm`: a batch script that makes the plan's job on a Slurm cluster.

Source: man sbatch, man srun (22.05 and later: srun takes --cpus-per-task from its own command line only).
"""

from math import ceil
from shlex import join

from cpulaunch.emit.resources import (
    MEETING,
    THIS_HOST,
    Needs,
    command_of,
    job_name,
    left_out,
    needs_of,
    program_of,
)
from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan

MARGIN_SECONDS = 10
"""Between the end of cpulaunch's grace and the job's time limit."""


def slurm_script(plan: LaunchPlan, host: Host, line: CommandLine) -> str:
    """The text for sbatch. Raises: UsageError if the plan has no program."""
    program = program_of(line, "slurm")
    needs = needs_of(plan, host)
    elastic = needs.hosts[0] < needs.hosts[1]
    dropped = (*THIS_HOST, *MEETING, *(() if elastic or needs.hosts[1] == 1 else ("nnodes",)))
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{directive}" for directive in _directives(plan, host, needs, name=job_name(program))),
        *_comments(line, dropped),
        "",
        f"srun {join(_srun(needs))} \\",
        f"    {join(command_of(line, program, without=dropped, ranks=plan.job is not None))}",
        "",
    ]
    return "\n".join(lines)


def _directives(plan: LaunchPlan, host: Host, needs: Needs, *, name: str) -> list[str]:
    fewest, most = needs.hosts
    smt = len({cpu.core for cpu in host.cpus}) < len(host.cpus)
    memory = None if needs.memory_mib is None else "0" if needs.whole else f"{needs.memory_mib}M"
    return [
        f"job-name={name}",
        f"nodes={most if fewest == most else f'{fewest}-{most}'}",
        "ntasks-per-node=1",
        f"cpus-per-task={needs.cpus}",
        *(["hint=nomultithread"] if smt and needs.cpus < needs.core_cpus else []),
        *([f"mem={memory}"] if memory is not None else []),
        *([f"gpus-per-node={needs.gpus}"] if needs.gpus else []),
        f"signal=TERM@{ceil(plan.launch.grace_seconds) + MARGIN_SECONDS}",
    ]


def _comments(line: CommandLine, dropped: tuple[str, ...]) -> list[str]:
    lost = left_out(line, (name for name in dropped if name != "nnodes"))
    return [
        "# Written by cpulaunch: one process on each host, which plans there and starts the ranks or instances.",
        "# CPUs and memory are those of the plan. Add what your cluster wants: --time, --partition, --account.",
        "# cpulaunch has to be on the PATH that sbatch is called with. mem=0 is all memory of a host.",
        *([f"# Left to Slurm: {', '.join(lost)}."] if lost else []),
    ]


def _srun(needs: Needs) -> list[str]:
    """srun's options: all CPUs of the task, and a host that fails ends the others."""
    return [f"--cpus-per-task={needs.cpus}", "--kill-on-bad-exit=1"]
