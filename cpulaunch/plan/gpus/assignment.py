"""The GPU of each rank: one rank for each visible device, on the cores and memory next to it.

The visible devices stay visible to every rank: programs choose their device by LOCAL_RANK, as under torchrun. With
--virtual-local-rank each rank sees its own device only.
"""

from __future__ import annotations

from cpulaunch.plan.gpus.placement import place_next_to_gpus, remote_warnings
from cpulaunch.plan.gpus.visible_devices import Device, VisibleDevices, torch_build, visible_devices
from cpulaunch.plan.placement.instances import Placement
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.plan.variables.resolve import per_worker
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host, count_text
from cpulaunch.records.plan import Note, VariableRequest
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CUDA = "CUDA_VISIBLE_DEVICES"
GPU_WORDS = ("gpu", "xpu")
"""Words of --nproc-per-node that require GPUs. Numbers and "auto" accept GPUs; the other words count CPUs."""


@record
class RankDevices:
    """What the ranks of a job compute on: the host's index of each rank's GPU, and the variables they need.

    `placement` None: the ranks compute on CPUs and are placed as on a host without GPUs.
    """

    placement: Placement | None
    gpus: tuple[int | None, ...]
    variable_requests: tuple[VariableRequest, ...]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...] = ()


def gpu_count(host: Host, request: LaunchRequest) -> int:
    """The number of devices that the ranks of this job can have; 0 if they compute on CPUs.

    Raises: UsageError if the request requires GPUs and this process has none.
    """
    visible = _devices_to_use(host, request)
    return 0 if visible is None else len(visible.devices)


def rank_devices(host: Host, request: LaunchRequest, pool: Pool, count: int) -> RankDevices:
    """What each of `count` ranks computes on, with the CPUs next to its GPU if it has one.

    Raises: UsageError if the request requires GPUs and this process has none, or if --virtual-local-rank finds fewer
    devices than ranks.
    """
    visible = _devices_to_use(host, request)
    if visible is None:
        variable_requests = _virtual_without_gpus(request, count)
        return RankDevices(
            placement=None, gpus=(None,) * count, variable_requests=variable_requests, notes=_cpu_note(host, request)
        )
    devices = _assigned(request, visible, count)
    return RankDevices(
        placement=place_next_to_gpus(host, request, pool, devices, visible.devices),
        gpus=tuple(device.gpu for device in devices),
        variable_requests=(*_order(visible), *_virtual(request, visible, devices)),
        notes=(_note(request, visible, devices),),
        warnings=(
            *(*visible.warnings, *_count_warnings(request, visible, count)),
            *_visibility_warnings(host, request, devices),
            *remote_warnings(host, pool, devices),
        ),
    )


def _assigned(request: LaunchRequest, visible: VisibleDevices, count: int) -> list[Device]:
    """The device of each rank, assigned in turn.

    Where a scheduler shows every rank a list of its own, only this rank's device is known and stands for all.
    """
    devices = visible.devices
    if request.scheduled_rank is not None and _has_own_list(request, visible, count):
        return [devices[request.scheduled_rank.local_rank % len(devices)]] * count
    return [devices[rank % len(devices)] for rank in range(count)]


def _has_own_list(request: LaunchRequest, visible: VisibleDevices, count: int) -> bool:
    """Whether a scheduler set a list of devices for this rank alone, so that the host's other ranks see others."""
    return request.scheduled_rank is not None and len(visible.devices) < count and bool(visible.restricted_by)


def _cpu_note(host: Host, request: LaunchRequest) -> tuple[Note, ...]:
    """The note on why ranks compute on CPUs; none if the host has no GPUs and --device was not given."""
    settings = request.settings
    if settings.device == "cpu":
        reason = "ranks are placed as on any host and leave the GPUs alone" if host.gpus else "requested"
    elif not host.gpus:
        return ()
    elif settings.nproc_per_node not in (None, "auto") and not isinstance(settings.nproc_per_node, int):
        reason = f"--nproc-per-node {settings.nproc_per_node} counts CPUs (--device gpu binds next to GPUs)"
    elif torch_build(host).startswith("cpu"):
        reason = "the worker's torch is a CPU-only build"
    else:
        reason = f"no GPU is available to this process: {_missing_text(host, visible_devices(host, request))}"
    return (Note(setting="device", value="cpu", origin=request.origin("device"), reason=reason),)


def _virtual_without_gpus(request: LaunchRequest, count: int) -> tuple[VariableRequest, ...]:
    """CUDA_VISIBLE_DEVICES for --virtual-local-rank with ranks on CPUs: torchrun sets it there too.

    Raises: UsageError if the user's own list has fewer devices than there are ranks.
    Source: torch 2.13, elastic/agent/server/local_elastic_agent.py, _set_local_rank_env.
    """
    if not request.settings.virtual_local_rank:
        return ()
    listed = request.environ.get(CUDA)
    names = [str(rank) for rank in range(count)] if listed is None else [part.strip() for part in listed.split(",")]
    return _one_each(request, CUDA, names, count, source=f"{CUDA}={listed}")


def may_use_gpus(host: Host, request: LaunchRequest) -> bool:
    """Whether the ranks of this job compute on GPUs if the host has any."""
    settings, nproc = request.settings, request.settings.nproc_per_node
    if not request.distributed or settings.device == "cpu":
        return False
    accepts = nproc is None or nproc == "auto" or isinstance(nproc, int)
    return _requires_gpus(request) or (accepts and not torch_build(host).startswith("cpu"))


def _requires_gpus(request: LaunchRequest) -> bool:
    """Whether a job without GPUs is an error."""
    return request.settings.device == "gpu" or request.settings.nproc_per_node in GPU_WORDS


def _devices_to_use(host: Host, request: LaunchRequest) -> VisibleDevices | None:
    """The devices of a job on GPUs, at least one; None for a job on CPUs.

    Raises: UsageError if the request requires GPUs and none is visible.
    """
    if not may_use_gpus(host, request):
        return None
    nproc = request.settings.nproc_per_node
    visible = visible_devices(host, request)
    if visible is not None and visible.devices:
        return visible
    if not _requires_gpus(request):
        return None
    raise UsageError(
        f"no {'Intel ' if nproc == 'xpu' else ''}GPU for the ranks",
        value=_missing_text(host, visible),
        source=f"--nproc-per-node {nproc}" if nproc in GPU_WORDS else "--device gpu",
        hint="--nproc-per-node numa starts a rank for each NUMA node; cpulaunch doctor reports what the GPUs lack",
    )


def _missing_text(host: Host, visible: VisibleDevices | None) -> str:
    """The reason why no device is visible, for a note or an error."""
    if visible is not None:
        return f"{visible.restricted_by} hides them"
    if not host.gpus:
        return "none found"
    usable = [gpu for gpu in host.gpus if gpu.accessible]
    if usable:
        return f"{len(usable)} found, vendor {', '.join(sorted({gpu.vendor for gpu in usable}))}"
    has_driver = any(gpu.driver is not None for gpu in host.gpus)
    return f"{len(host.gpus)} found, {'none accessible to this process' if has_driver else 'none with a driver'}"


def _count_warnings(request: LaunchRequest, visible: VisibleDevices, count: int) -> tuple[str, ...]:
    """Warnings about ranks whose LOCAL_RANK exceeds the devices they see."""
    devices = len(visible.devices)
    shown = count_text(devices, "visible GPU")
    if count <= devices:
        return ()
    if not _has_own_list(request, visible, count):
        return (
            f"{count} ranks share {shown}: a program that selects its GPU by LOCAL_RANK fails on the last "
            "ranks, and NCCL does not support sharing",
        )
    rank = request.scheduled_rank
    if rank is None or rank.local_rank < devices or request.settings.virtual_local_rank:
        return ()
    return (
        f"this rank has {shown}, so a program that selects its GPU by LOCAL_RANK ({rank.local_rank}) fails: "
        "use --virtual-local-rank, or make all GPUs visible to all ranks",
    )


def _visibility_warnings(host: Host, request: LaunchRequest, devices: Sequence[Device]) -> tuple[str, ...]:
    """Warnings about devices that a rank may not see.

    Source: NVIDIA Multi-Instance GPU user guide ("a single CUDA process can only enumerate a single MIG device";
    names of MIG devices changed with driver R470).
    """
    warnings = []
    names = {device.name for device in devices if device.mig}
    if len(names) > 1 and not request.settings.virtual_local_rank:
        warnings.append(
            "CUDA shows each process only one MIG device: every rank sees the first one "
            "(--virtual-local-rank gives each rank its own)"
        )
    elif any("/" in name for name in names) and CUDA not in request.environ:
        warnings.append(
            "MIG devices are named as in drivers before R470; only NVML knows the current names "
            "(pip install 'cpulaunch[gpu]')"
        )
    if host.torch is not None and torch_build(host).startswith("cpu"):
        warnings.append(f"torch {host.torch.version} is a CPU-only build and does not use the GPUs")
    return tuple(warnings)


def _order(visible: VisibleDevices) -> tuple[VariableRequest, ...]:
    return tuple(
        VariableRequest(name=name, value=value, origin="default", reason=reason)
        for name, value, reason in visible.vendor.order_variables
    )


def _virtual(request: LaunchRequest, visible: VisibleDevices, devices: Sequence[Device]) -> tuple[VariableRequest, ...]:
    if not request.settings.virtual_local_rank:
        return ()
    names = [device.name for device in (visible.devices if request.scheduled_rank is None else devices)]
    return _one_each(
        request, visible.variable, names, len(devices), source=visible.restricted_by or "GPUs of this host"
    )


def _one_each(
    request: LaunchRequest, variable: str, names: Sequence[str], ranks: int, *, source: str
) -> tuple[VariableRequest, ...]:
    """The variable that shows each rank its own device only. `source`: where `names` come from.

    Raises: UsageError if there are more ranks than names, or if --env sets the variable.
    """
    if ranks > len(names):
        raise UsageError(
            "--virtual-local-rank needs a device for every rank",
            value=f"{ranks} ranks, {count_text(len(names), 'device')}",
            source=source,
            hint=f"--nproc-per-node {len(names)} or fewer",
        )
    if variable in dict(request.settings.env):
        raise UsageError(
            f"--virtual-local-rank sets {variable} for every rank",
            source="--env",
            hint=f"put {variable}=... in front of cpulaunch to choose the devices",
        )
    reason = "--virtual-local-rank: each rank sees only its own device, as device 0"
    return (per_worker(variable, names[:ranks], origin="cli", reason=reason),)


def _note(request: LaunchRequest, visible: VisibleDevices, devices: Sequence[Device]) -> Note:
    gpus = {device.gpu for device in devices if device.gpu is not None}
    used = len({(device.gpu, device.name) for device in devices})
    noun = "MIG devices" if any(device.mig for device in devices) else "devices"
    where = f"in {visible.restricted_by}" if visible.restricted_by else "in PCI order"
    reason = f"{used} of {len(visible.devices)} visible {noun}, {where}; each rank on the cores next to its device"
    return Note(setting="gpu", value=format_cpulist(gpus), origin=request.origin("device"), reason=reason)
