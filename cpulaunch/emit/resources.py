"""The resources that a plan needs on a cluster, and the cpulaunch command that makes the same plan there."""

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
HOST_SETTINGS = ("cpus", "numa_nodes")
"""Settings that name parts of this machine; a machine of the cluster may lack them or not grant them."""
RENDEZVOUS_SETTINGS = ("node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "local_addr", "scheduler")
"""Settings that tell hosts how to find each other; the cluster sets them."""


@record
class ResourceRequest:
    """The resources to request for each host of the job.

    `cpus`: logical CPUs of the workers. `core_cpus`: these and their SMT siblings, which no other job should get.
    `share`: the workers' part of this host's cores. `memory_mib`: the same part of its memory; None if unknown.
    `whole`: this is all of the host's memory.
    """

    hosts: tuple[int, int]
    cpus: int
    core_cpus: int
    share: float
    memory_mib: int | None
    whole: bool
    gpus: int
    gpu_vendor: str | None


def resources_of(plan: LaunchPlan, host: Host) -> ResourceRequest:
    """The resources that the plan takes on this host, to request for each host of the job."""
    cpus = _exclusive_cpus(plan, host)
    core_of = {cpu.id: cpu.core for cpu in host.cpus}
    cores = {core_of[cpu] for cpu in cpus}
    core_cpus = sum(core in cores for core in core_of.values())
    threads = max(1, sum(worker.threads for worker in plan.workers))
    share = len(cores) / len(set(core_of.values())) if cpus else min(1.0, threads / len(core_of))
    limits = [size for size in (host.memory_bytes, host.limits.memory_bytes) if size]
    gpus = {worker.gpu for worker in plan.workers if worker.gpu is not None}
    vendors = [gpu.vendor for gpu in host.gpus if gpu.index in gpus]
    return ResourceRequest(
        hosts=plan.job.hosts if plan.job is not None else (1, 1),
        cpus=len(cpus) or threads,
        core_cpus=core_cpus or threads,
        share=share,
        memory_mib=int(min(limits) * share) // MIB if limits else None,
        whole=share == 1 and bool(limits) and min(limits) == host.memory_bytes,
        gpus=len(gpus),
        gpu_vendor=vendors[0] if vendors else None,
    )


def _exclusive_cpus(plan: LaunchPlan, host: Host) -> frozenset[int]:
    """The logical CPUs of all workers; empty if the workers are not bound, or share more CPUs than a quota pays for."""
    cpus = frozenset(cpu for worker in plan.workers for cpu in worker.all_cpus)
    return cpus if len(cpus) <= host.limits.budget.threads else frozenset()


def chosen_settings(command_line: CommandLine) -> dict[str, Any]:
    """The settings that the command line or torchrun's variables set, by name."""
    values: dict[str, Any] = {}
    for layer in reversed(command_line.layers):
        values |= layer.values
    return values | command_line.values


def chosen_flags(command_line: CommandLine, names: Iterable[str]) -> list[str]:
    """The flags of those of the named settings that are set, for a comment."""
    chosen = chosen_settings(command_line)
    return [setting_specs()[name].flag for name in names if name in chosen]


def required_program(command_line: CommandLine, form: str) -> Program:
    """The program of the command line. Raises: UsageError if it has none."""
    if command_line.program is None:
        raise UsageError("no program to start", source=f"--emit {form}", hint=f"cpulaunch plan --emit {form} SCRIPT")
    return command_line.program


def cpulaunch_command(
    command_line: CommandLine, program: Program, *, without: Collection[str], ranks: bool = False
) -> list[str]:
    """The words of the cpulaunch command with the chosen settings, except those named in `without`.

    `ranks`: the plan is a job of ranks, and the command must show that by an option.
    """
    chosen = {name: value for name, value in chosen_settings(command_line).items() if name not in without}
    words = ["cpulaunch"]
    if ranks and not any(name in JOB_SETTINGS for name in chosen):
        words += ["--nproc-per-node", "1"]
    for name, value in chosen.items():
        words += setting_specs()[name].arguments(value)
    words += {"module": ["-m"], "command": ["--no-python"], "script": []}[program.kind]
    separator = ["--"] if program.target.startswith("-") else []
    return [*words, *separator, program.target, *program.args]


def job_name(program: Program) -> str:
    """A name for the job, from the program's: at most 50 lower-case letters, digits and dashes, starting with a letter.

    Source: Kubernetes, "Object Names and IDs" (RFC 1035 labels, which a PyTorchJob's services need; pods append to it).
    """
    stem = program.target.rstrip("/").rpartition("/")[2].removesuffix(".py").lower()
    name = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in stem).strip("-")
    if not name[:1].isalpha():
        name = f"job-{name}" if name else "cpulaunch"
    return name[:50].strip("-")
