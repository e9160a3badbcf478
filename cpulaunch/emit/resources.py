"""What a plan needs of a cluster, and the command that makes the same plan there."""

from collections.abc import Collection, Iterable
from typing import Any

from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.record import record
from cpulaunch.records.request import Program
from cpulaunch.records.settings import JOB_SETTINGS, setting_specs

MIB = 1 << 20
THIS_HOST = ("cpus", "numa_nodes")
"""Settings that name parts of this machine, which another one may not have or not give."""
MEETING = ("node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "local_addr", "scheduler")
"""Settings that say where hosts meet, which a cluster knows better."""


@record
class Needs:
    """What each host of the job is asked for.

    `cpus`: logical CPUs given out. `core_cpus`: those and their SMT siblings, which nobody else should get. `share`:
    the part of this host's cores, and `memory_mib` that part of the memory it may use; `whole`: it is all that it has.
    """

    hosts: tuple[int, int]
    cpus: int
    core_cpus: int
    share: float
    memory_mib: int | None
    whole: bool
    gpus: int
    gpu_vendor: str | None


def needs_of(plan: LaunchPlan, host: Host) -> Needs:
    """What the plan takes of this host, for each host of the job."""
    cpus = _own_cpus(plan, host)
    core_of = {cpu.id: cpu.core for cpu in host.cpus}
    cores = {core_of[cpu] for cpu in cpus}
    siblings = sum(core in cores for core in core_of.values())
    unbound = max(1, sum(worker.threads for worker in plan.workers))
    share = len(cores) / len(set(core_of.values())) if cpus else min(1.0, unbound / len(core_of))
    limits = [size for size in (host.memory_bytes, host.limits.memory_bytes) if size]
    gpus = {worker.gpu for worker in plan.workers if worker.gpu is not None}
    vendors = [gpu.vendor for gpu in host.gpus if gpu.index in gpus]
    return Needs(
        hosts=plan.job.hosts if plan.job is not None else (1, 1),
        cpus=len(cpus) or unbound,
        core_cpus=siblings or unbound,
        share=share,
        memory_mib=int(min(limits) * share) // MIB if limits else None,
        whole=share == 1 and bool(limits) and min(limits) == host.memory_bytes,
        gpus=len(gpus),
        gpu_vendor=vendors[0] if vendors else None,
    )


def _own_cpus(plan: LaunchPlan, host: Host) -> frozenset[int]:
    """The logical CPUs given out; empty where workers are not bound, or a quota pays for fewer than they share."""
    cpus = frozenset(cpu for worker in plan.workers for cpu in worker.all_cpus)
    return cpus if len(cpus) <= host.limits.budget.threads else frozenset()


def asked_for(line: CommandLine) -> dict[str, Any]:
    """Every setting that the command line or torchrun's variables chose."""
    values: dict[str, Any] = {}
    for layer in reversed(line.layers):
        values |= layer.values
    return values | line.values


def program_of(line: CommandLine, form: str) -> Program:
    """The program of the command line. Raises: UsageError if there is none."""
    if line.program is None:
        raise UsageError("no program to start", source=f"--emit {form}", hint="name the program to run")
    return line.program


def command_of(line: CommandLine, program: Program, *, without: Collection[str], ranks: bool = False) -> list[str]:
    """The words of `cpulaunch` with what was asked for, but for some settings, and the program.

    `ranks`: the command itself has to say that it is a job of ranks.
    """
    asked = {name: value for name, value in asked_for(line).items() if name not in without}
    words = ["cpulaunch"]
    if ranks and not any(name in JOB_SETTINGS for name in asked):
        words += ["--nproc-per-node", "1"]
    for name, value in asked.items():
        words += setting_specs()[name].arguments(value)
    words += {"module": ["-m"], "command": ["--no-python"], "script": []}[program.kind]
    guard = ["--"] if program.target.startswith("-") else []
    return [*words, *guard, program.target, *program.args]


def left_out(line: CommandLine, names: Iterable[str]) -> list[str]:
    """The flags of those settings that were chosen, for a comment."""
    chosen = asked_for(line)
    return [setting_specs()[name].flag for name in names if name in chosen]


def job_name(program: Program) -> str:
    """A name for the job made of the program's: small letters, digits and dashes, a letter first, at most 50.

    Source: Kubernetes, "Object Names and IDs" (RFC 1035 labels, which a PyTorchJob's services need; pods append to it).
    """
    stem = program.target.rstrip("/").rpartition("/")[2].removesuffix(".py").lower()
    name = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in stem).strip("-")
    if not name[:1].isalpha():
        name = f"job-{name}" if name else "cpulaunch"
    return name[:50].strip("-")
