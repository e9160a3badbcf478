"""The command line of each worker: interpreter and program, started by numactl or taskset if the binder is one."""

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.request import Program
from cpulaunch.records.settings import Binder, MemoryPolicy

RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Source: torchrun, run_script_path."""


def program_argv(program: Program | None, *, unbuffered: bool, run_path: bool = False) -> tuple[str, ...]:
    """The command line of a worker without a binder; empty for a plan without a program.

    `unbuffered`: Python gets -u. `run_path`: Python runs the script with runpy.run_path.
    """
    if program is None:
        return ()
    if program.kind == "command":
        return (program.target, *program.args)
    python = (program.interpreter, "-u") if unbuffered else (program.interpreter,)
    if run_path:
        return (*python, "-c", RUN_PATH, program.target, *program.args)
    if program.kind == "module":
        return (*python, "-m", program.target, *program.args)
    return (*python, program.target, *program.args)


def rank_argv(argv: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """The command line of one rank, with its local rank substituted in the arguments.

    Source: torch elastic, macros.substitute, which leaves the executable as it is.
    """
    from cpulaunch.plan.ranks.templates import substitute

    values = {"local_rank": str(local_rank)}
    return tuple(
        word if position == 0 or "$" not in word else substitute(word, values) for position, word in enumerate(argv)
    )


def bound_argv(
    argv: tuple[str, ...],
    *,
    binder: Binder,
    cpus: frozenset[int],
    mempolicy: MemoryPolicy,
    nodes: frozenset[int],
) -> tuple[str, ...]:
    """The command line with the binder that starts it, if there is one. Source: man numactl, man taskset."""
    if not argv:
        return ()
    if binder == "taskset" and cpus:
        return ("taskset", "-c", format_cpulist(cpus), *argv)
    if binder != "numactl":
        return argv
    options = (*(("-C", format_cpulist(cpus)) if cpus else ()), *numactl_options(mempolicy, nodes))
    return ("numactl", *options, *argv) if options else argv


def numactl_options(mempolicy: MemoryPolicy, nodes: frozenset[int]) -> tuple[str, ...]:
    """numactl's option for a memory policy; -P (preferred-many) needs numactl 2.0.15."""
    if mempolicy == "none" or not nodes:
        return ()
    option = {"preferred": "-P" if len(nodes) > 1 else "-p", "bind": "-m", "interleave": "-i"}[mempolicy]
    return (option, format_cpulist(nodes))
