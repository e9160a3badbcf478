"""Ranks on a host with GPUs: one for each visible device, on the cores and memory next to it.

What is visible stays so: programs choose their device by LOCAL_RANK, as under torchrun. --virtual-local-rank shows
every rank its own device alone.
"""

from __future__ import annotations

from cpulaunch.plan.gpus.placement import next_to_gpus, remote_warnings
from cpulaunch.plan.gpus.visible_devices import Device, Visible, torch_build, visible_devices
from cpulaunch.plan.placement.instances import Placement
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.plan.variables.resolve import VariableRequest, per_worker
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import Note
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CUDA = "CUDA_VISIBLE_DEVICES"
INSIST = ("gpu", "xpu")
"""Words of --nproc-per-node that ask for GPUs; the others but auto and a number ask for CPUs."""


@record
class RankDevices:
    """What the ranks of a job compute on: the host's index of each rank's GPU, and their variables.

    `placement` None: on CPUs, and their places are for others to choose.
    """

    placement: Placement | None
    gpus: tuple[int | None, ...]
    variable_requests: tuple[VariableRequest, ...]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...] = ()


def gpu_count(host: Host, request: LaunchRequest) -> int:
    """How many devices the ranks of this job can have; 0 if they compute on CPUs.

    Raises: UsageError if GPUs were asked for and this process has none.
    """
    visible = _wanted(host, request)
    return 0 if visible is None else len(visible.devices)


def rank_devices(host: Host, request: LaunchRequest, pool: Pool, count: int) -> RankDevices:
    """The ranks next to their GPUs, or on CPUs.

    Raises: UsageError if GPUs were asked for and this process has none, or --virtual-local-rank finds too few.
    """
    visible = _wanted(host, request)
    if visible is None:
        variable_requests = _virtual_without_gpus(request, count)
        return RankDevices(
            placement=None, gpus=(None,) * count, variable_requests=variable_requests, notes=_cpu_note(host, request)
        )
    given = _given(request, visible, count)
    return RankDevices(
        placement=next_to_gpus(host, request, pool, given, visible.devices),
        gpus=tuple(device.gpu for device in given),
        variable_requests=(*_order(visible), *_virtual(request, visible, given)),
        notes=(_note(request, visible, given),),
        warnings=(
            *(*visible.warnings, *_sharing(request, visible, count), *_unseen(host, request, given)),
            *remote_warnings(host, pool, given),
        ),
    )


def _given(request: LaunchRequest, visible: Visible, count: int) -> list[Device]:
    """Each rank's device: in turn, or, where a scheduler shows every process its own devices, all as this one's."""
    devices = visible.devices
    if _private(request, visible, count) and request.scheduled_rank is not None:
        return [devices[request.scheduled_rank.local_rank % len(devices)]] * count
    return [devices[rank % len(devices)] for rank in range(count)]


def _private(request: LaunchRequest, visible: Visible, count: int) -> bool:
    """Whether the other ranks of this host see other devices than this one does: a scheduler set its own list."""
    return request.scheduled_rank is not None and len(visible.devices) < count and bool(visible.limits)


def _cpu_note(host: Host, request: LaunchRequest) -> tuple[Note, ...]:
    """Why the ranks of a host with GPUs compute on its CPUs."""
    settings = request.settings
    if settings.device == "cpu":
        reason = "ranks are placed as on any host, and the GPUs are left as they are" if host.gpus else "asked for"
    elif not host.gpus:
        return ()
    elif settings.nproc_per_node not in (None, "auto") and not isinstance(settings.nproc_per_node, int):
        reason = f"--nproc-per-node {settings.nproc_per_node} counts CPUs (--device gpu binds next to GPUs)"
    elif torch_build(host).startswith("cpu"):
        reason = "the worker's torch is a build for CPUs, and the GPUs are left as they are"
    else:
        reason = f"no GPU is open to this process: {_absence(host, visible_devices(host, request))}"
    return (Note(setting="device", value="cpu", origin=request.origin("device"), reason=reason),)


def _virtual_without_gpus(request: LaunchRequest, count: int) -> tuple[VariableRequest, ...]:
    """CUDA_VISIBLE_DEVICES for --virtual-local-rank where ranks compute on CPUs: torchrun sets it there too.

    Raises: UsageError if the user's own list has fewer devices than there are ranks.
    Source: torch 2.13, elastic/agent/server/local_elastic_agent.py, _set_local_rank_env.
    """
    if not request.settings.virtual_local_rank:
        return ()
    listed = request.environ.get(CUDA)
    names = [str(rank) for rank in range(count)] if listed is None else [part.strip() for part in listed.split(",")]
    return _one_each(request, CUDA, names, count, limits=f"{CUDA}={listed}")


def may_use_gpus(host: Host, request: LaunchRequest) -> bool:
    """Whether the ranks of this job compute on GPUs if there are any."""
    settings, asked = request.settings, request.settings.nproc_per_node
    if not request.distributed or settings.device == "cpu":
        return False
    counted = asked is None or asked == "auto" or isinstance(asked, int)
    return _insisted(request) or (counted and not torch_build(host).startswith("cpu"))


def _insisted(request: LaunchRequest) -> bool:
    """Whether a job without GPUs is an error."""
    return request.settings.device == "gpu" or request.settings.nproc_per_node in INSIST


def _wanted(host: Host, request: LaunchRequest) -> Visible | None:
    """The devices of a job on GPUs, at least one; None for a job on CPUs. Raises: UsageError if there must be some."""
    if not may_use_gpus(host, request):
        return None
    asked = request.settings.nproc_per_node
    visible = visible_devices(host, request)
    if visible is not None and visible.devices:
        return visible
    if not _insisted(request):
        return None
    raise UsageError(
        f"nproc {asked} without {'Intel ' if asked == 'xpu' else ''}GPU" if asked in INSIST else "no GPU for the ranks",
        value=_absence(host, visible),
        source=f"--nproc-per-node {asked}" if asked in INSIST else "--device gpu",
        hint="--nproc-per-node numa starts a rank for each NUMA node; cpulaunch doctor says what GPUs lack",
    )


def _absence(host: Host, visible: Visible | None) -> str:
    """Why no device is visible."""
    if visible is not None:
        return f"{visible.limits} hides them"
    if not host.gpus:
        return "none found"
    drivers = {gpu.driver for gpu in host.gpus} - {None}
    usable = [gpu for gpu in host.gpus if gpu.accessible]
    if usable:
        return f"{len(usable)} found, of {', '.join(sorted({gpu.vendor for gpu in usable}))}"
    return f"{len(host.gpus)} found, {'none given to this process' if drivers else 'none with a driver'}"


def _sharing(request: LaunchRequest, visible: Visible, count: int) -> tuple[str, ...]:
    """Warnings where several ranks would compute on one device, or look for theirs under another's number."""
    devices = len(visible.devices)
    shown = f"visible GPU{'s' * (devices > 1)}"
    if count <= devices:
        return ()
    if not _private(request, visible, count):
        return (
            f"{count} ranks on {devices} {shown}: they are dealt out in turn, but a program "
            "that chooses its device by LOCAL_RANK finds none for the last ones, and NCCL refuses to share",
        )
    rank = request.scheduled_rank
    if rank is None or rank.local_rank < devices or request.settings.virtual_local_rank:
        return ()
    return (
        f"this rank has {devices} {shown}, and a program that chooses its device by LOCAL_RANK ({rank.local_rank}) "
        "finds none: --virtual-local-rank, or have all GPUs shown to all ranks",
    )


def _unseen(host: Host, request: LaunchRequest, given: Sequence[Device]) -> tuple[str, ...]:
    """Warnings where a rank may not reach its device.

    Source: NVIDIA Multi-Instance GPU user guide ("a single CUDA process can only enumerate a single MIG device";
    names of MIG devices changed with driver R470).
    """
    warnings = []
    names = {device.name for device in given if device.mig}
    if len(names) > 1 and not request.settings.virtual_local_rank:
        warnings.append(
            "CUDA shows a process one MIG device only: every rank sees the first "
            "(--virtual-local-rank gives each its own)"
        )
    elif any("/" in name for name in names) and CUDA not in request.environ:
        warnings.append(
            "MIG devices go by the names that drivers before R470 gave them: only NVML knows the new ones "
            "(pip install 'cpulaunch[gpu]')"
        )
    if host.torch is not None and torch_build(host).startswith("cpu"):
        warnings.append(f"torch {host.torch.version} computes on CPUs only: it will not see the GPUs")
    return tuple(warnings)


def _order(visible: Visible) -> tuple[VariableRequest, ...]:
    return tuple(
        VariableRequest(name=name, value=value, origin="default", reason=reason)
        for name, value, reason in visible.vendor.order
    )


def _virtual(request: LaunchRequest, visible: Visible, given: Sequence[Device]) -> tuple[VariableRequest, ...]:
    if not request.settings.virtual_local_rank:
        return ()
    names = [device.name for device in (visible.devices if request.scheduled_rank is None else given)]
    return _one_each(request, visible.variable, names, len(given), limits=visible.limits or "GPUs of this host")


def _one_each(
    request: LaunchRequest, variable: str, names: Sequence[str], ranks: int, *, limits: str
) -> tuple[VariableRequest, ...]:
    """The variable that shows every rank its own device alone. Raises: UsageError if it cannot."""
    if ranks > len(names):
        raise UsageError(
            "more ranks than visible devices",
            value=f"--virtual-local-rank with {ranks} ranks, {len(names)} devices",
            source=limits,
            hint=f"--nproc-per-node {len(names)} or fewer",
        )
    if variable in dict(request.settings.env):
        raise UsageError(
            f"--virtual-local-rank sets {variable} for every rank",
            value=dict(request.settings.env)[variable],
            source="--env",
            hint=f"{variable}=... in front of cpulaunch says which devices to deal out",
        )
    reason = "--virtual-local-rank: every rank sees its own device alone, as device 0"
    return (per_worker(variable, names[:ranks], origin="cli", reason=reason),)


def _note(request: LaunchRequest, visible: Visible, given: Sequence[Device]) -> Note:
    gpus = {device.gpu for device in given if device.gpu is not None}
    used = len({(device.gpu, device.name) for device in given})
    what = "MIG devices" if any(device.mig for device in given) else "devices"
    parts = [f"{used} of {len(visible.devices)} visible {what}, in PCI order" if not visible.limits else ""]
    if visible.limits:
        parts = [f"{used} of the {len(visible.devices)} {what} of {visible.limits}"]
    parts.append("each rank on the cores next to its own")
    return Note(setting="gpu", value=format_cpulist(gpus), origin=request.origin("device"), reason="; ".join(parts))
