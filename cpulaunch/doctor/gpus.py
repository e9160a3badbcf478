"""The checks of GPUs, which jobs of ranks use (--nproc-per-node gpu)."""

from cpulaunch.doctor.facts import Facts
from cpulaunch.doctor.findings import Finding, advice, ok, problem, skipped
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import Gpu, count_text

MODULES = {"nvidia": "nvidia", "amd": "amdgpu", "intel": "xe"}
"""Vendor -> the kernel module that is its driver."""


def _usable(facts: Facts) -> list[Gpu]:
    return [gpu for gpu in facts.host.gpus if gpu.accessible]


def _names(gpus: list[Gpu]) -> str:
    return f"GPU{'s' * (len(gpus) > 1)} {format_cpulist(gpu.index for gpu in gpus)}"


def gpu_driver(facts: Facts) -> tuple[Finding, ...]:
    """Whether this process can use every GPU of the machine."""
    gpus = facts.host.gpus
    if not gpus:
        return ok("no GPUs")
    usable, bare = _usable(facts), [gpu for gpu in gpus if gpu.driver is None and not gpu.accessible]
    if bare and not facts.host.container:
        module = MODULES[bare[0].vendor]
        return problem(
            f"{_names(bare)} ({bare[0].vendor}): no driver",
            why="a GPU without a driver cannot be used",
            fix=f"install the vendor's driver, then: sudo modprobe {module}",
        )
    models = ", ".join(dict.fromkeys(gpu.model or gpu.vendor for gpu in usable))
    if len(usable) == len(gpus):
        return ok(f"{len(gpus)} GPUs: {models}" if len(gpus) > 1 else f"1 GPU: {models}")
    if usable or facts.host.container:
        given = f"{len(usable)} of the machine's {len(gpus)} GPUs" + (f": {models}" if models else "")
        return ok(f"this container has {given}" if facts.host.container else given)
    return problem(
        f"{_names(list(gpus))}: the driver is loaded, but this process has no device file",
        why="programs will not find the GPU",
        fix="docker run --gpus all ..., or ask the scheduler for GPUs",
    )


def gpu_names(facts: Facts) -> tuple[Finding, ...]:
    """Whether each rank can get a MIG device of its own."""
    nvidia = [gpu for gpu in _usable(facts) if gpu.vendor == "nvidia"]
    cut = [gpu for gpu in nvidia if gpu.mig]
    if not nvidia:
        return ok("no NVIDIA GPUs")
    if not cut:
        return ok("no MIG devices: UUIDs come from the driver's files")
    count = sum(len(gpu.mig) for gpu in cut)
    if all(each.uuid is not None for gpu in cut for each in gpu.mig):
        return ok(f"{count_text(count, 'MIG device')} on {_names(cut)}")
    return advice(
        f"{count_text(count, 'MIG device')} on {_names(cut)} with unknown UUIDs",
        why="--virtual-local-rank needs the UUIDs, which only NVML provides",
        fix="pip install 'cpulaunch[gpu]'",
    )


def gpu_locality(facts: Facts) -> tuple[Finding, ...]:
    """Whether each rank can be bound to cores next to its GPU."""
    usable = _usable(facts)
    nodes = {node.id: node for node in facts.host.numa_nodes if node.cpus}
    if not usable:
        return ok("no GPUs") if not facts.host.gpus else skipped("none of the GPUs is available to this process")
    if len(nodes) < 2:
        return ok("a single NUMA node: all cores are equally close")
    lost = [gpu for gpu in usable if gpu.numa_node is None]
    if lost:
        return advice(
            f"{_names(lost)}: NUMA node not reported by the firmware",
            why="ranks cannot be placed near their GPUs, so about half of the copies cross sockets",
            fix="pass the host's PCI topology to the virtual machine (QEMU: pxb-pcie,numa_node=N)",
        )
    budget = facts.host.limits.budget
    far = [gpu for gpu in usable if gpu.numa_node in nodes and nodes[gpu.numa_node].cpus.isdisjoint(budget.cpus)]
    if not far:
        return ok("usable cores close to every GPU")
    return advice(
        f"{_names(far)}: none of the CPUs of this process ({budget.limited_by}) is close",
        why="ranks run on another NUMA node, so all their GPU traffic crosses sockets",
        fix=f"request CPUs of NUMA node {format_cpulist({gpu.numa_node or 0 for gpu in far})} as well, or other GPUs",
    )
