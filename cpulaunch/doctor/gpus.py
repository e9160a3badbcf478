"""The checks of doctor on GPUs, as jobs of ranks use them (--nproc-per-node gpu)."""

from cpulaunch.doctor.facts import Facts
from cpulaunch.doctor.machine import Finding, skipped
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import Gpu

MODULES = {"nvidia": "nvidia", "amd": "amdgpu", "intel": "xe"}
"""The kernel module that drives each vendor's GPUs."""


def _usable(facts: Facts) -> list[Gpu]:
    return [gpu for gpu in facts.host.gpus if gpu.accessible]


def _names(gpus: list[Gpu]) -> str:
    return f"GPU {format_cpulist(gpu.index for gpu in gpus)}"


def _ok(found: str) -> tuple[Finding, ...]:
    return (Finding(status="ok", found=found),)


def gpu_driver(facts: Facts) -> tuple[Finding, ...]:
    """Whether the GPUs that are built in can be computed on."""
    gpus = facts.host.gpus
    if not gpus:
        return _ok("no GPUs")
    usable, bare = _usable(facts), [gpu for gpu in gpus if gpu.driver is None and not gpu.accessible]
    if bare and not facts.host.container:
        module = MODULES[bare[0].vendor]
        return (
            Finding(
                status="problem",
                found=f"{_names(bare)} ({bare[0].vendor}): no driver",
                why="no program can compute on a GPU that no driver has taken",
                fix=f"install the vendor's driver, then: sudo modprobe {module}",
            ),
        )
    models = ", ".join(dict.fromkeys(gpu.model or gpu.vendor for gpu in usable))
    if len(usable) == len(gpus):
        return _ok(f"{len(gpus)} GPUs: {models}" if len(gpus) > 1 else f"1 GPU: {models}")
    if usable or facts.host.container:
        given = f"{len(usable)} of the machine's {len(gpus)} GPUs" + (f": {models}" if models else "")
        return _ok(f"this container was given {given}" if facts.host.container else given)
    return (
        Finding(
            status="problem",
            found=f"{_names(list(gpus))}: there is a driver, but no device file for this process",
            why="programs find no GPU",
            fix="docker run --gpus all ..., or ask the scheduler for GPUs",
        ),
    )


def gpu_names(facts: Facts) -> tuple[Finding, ...]:
    """Whether ranks can be given MIG devices of their own."""
    nvidia = [gpu for gpu in _usable(facts) if gpu.vendor == "nvidia"]
    cut = [gpu for gpu in nvidia if gpu.mig]
    if not nvidia:
        return _ok("no NVIDIA GPUs")
    if not cut:
        return _ok("no MIG devices: UUIDs come from the driver's files")
    count = sum(len(gpu.mig) for gpu in cut)
    if all(each.uuid is not None for gpu in cut for each in gpu.mig):
        return _ok(f"{count} MIG devices on {_names(cut)}")
    return (
        Finding(
            status="advice",
            found=f"{count} MIG devices on {_names(cut)}, of unknown UUIDs",
            why="--virtual-local-rank gives every rank a MIG device by its UUID, which only NVML knows",
            fix="pip install 'cpulaunch[gpu]'",
        ),
    )


def gpu_locality(facts: Facts) -> tuple[Finding, ...]:
    """Whether ranks can be bound to cores next to their GPUs."""
    usable = _usable(facts)
    nodes = {node.id: node for node in facts.host.numa_nodes if node.cpus}
    if not usable:
        return _ok("no GPUs to be near to") if not facts.host.gpus else skipped("this process has none of the GPUs")
    if len(nodes) < 2:
        return _ok("one NUMA node: every core is near")
    lost = [gpu for gpu in usable if gpu.numa_node is None]
    if lost:
        return (
            Finding(
                status="advice",
                found=f"{_names(lost)}: the firmware does not say on which NUMA node",
                why="ranks share all cores, and half of the copies to a GPU cross between sockets",
                fix="in a virtual machine, give it the host's PCI topology (QEMU: pxb-pcie,numa_node=N)",
            ),
        )
    budget = facts.host.limits.budget
    far = [gpu for gpu in usable if gpu.numa_node in nodes and nodes[gpu.numa_node].cpus.isdisjoint(budget.cpus)]
    if not far:
        return _ok("cores next to every GPU")
    return (
        Finding(
            status="advice",
            found=f"{_names(far)}: none of our CPUs ({budget.limited_by}) is next to it",
            why="ranks run on another NUMA node, and all they send to the GPU crosses between sockets",
            fix=f"ask for CPUs of NUMA node {format_cpulist({gpu.numa_node or 0 for gpu in far})} too, or other GPUs",
        ),
    )
