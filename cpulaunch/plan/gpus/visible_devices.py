"""The GPUs a program of this job will see, in its own order: the host's, narrowed by the user's variables.

Source: CUDA, https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html; ROCm,
https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html; Level Zero, "Environment variables" and "Affinity
mask" of https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/PROG.html; torch 2.13, torch/cuda.
"""

from __future__ import annotations

from cpulaunch.records.host import Gpu, Host
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@record(kw_only=False)
class Vendor:
    """How one vendor's runtimes count and hide devices.

    `order`: variables, values and reasons that make a program count devices as this plan does. `hide`: variables that
    hide devices, each relative to what the one before leaves; of those joined by a space the first that is set counts.
    `builds`: how torch's version names builds for it.
    """

    name: str
    order: tuple[tuple[str, str, str], ...]
    hide: tuple[str, ...]
    builds: str


VENDORS = (
    Vendor(
        "nvidia",
        (("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "cuda:N is the Nth GPU in PCI order, as here and in nvidia-smi"),),
        ("CUDA_VISIBLE_DEVICES",),
        "cu",
    ),
    Vendor("amd", (), ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES"), "rocm"),
    Vendor(
        "intel",
        (
            ("ZE_ENABLE_PCI_ID_DEVICE_ORDER", "1", "xpu:N is the Nth GPU in PCI order, as here"),
            ("ZE_FLAT_DEVICE_HIERARCHY", "FLAT", "every tile is a device, as Level Zero counts by default"),
        ),
        ("ZE_AFFINITY_MASK",),
        "xpu",
    ),
)


COUNTED = {"gpu": ("nvidia", "amd"), "xpu": ("intel",)}
"""Whose GPUs a word of --nproc-per-node counts. Source: torch 2.13, torch/distributed/run.py."""
UNMASKED = ("", "default")
"""Level Zero masks that hide nothing. Source: Intel's compute-runtime, ExecutionEnvironment::parseAffinityMask."""
LONGEST_INDEX = 4
"""Digits of a device's number; longer ones are none."""


@record(kw_only=False)
class Device:
    """What a program sees as one device: the host's GPU it is on (None: unknown), its name in `Visible.variable`."""

    gpu: int | None
    name: str
    mig: bool = False


@record(kw_only=False)
class Visible:
    """The devices in the order of the program's indexes, and the variable that narrows them.

    `limits`: the user's variables that hid some ("CUDA_VISIBLE_DEVICES=2,3"); "" where none is set.
    """

    vendor: Vendor
    devices: tuple[Device, ...]
    variable: str
    limits: str = ""
    warnings: tuple[str, ...] = ()


def visible_devices(host: Host, request: LaunchRequest) -> Visible | None:
    """The devices that a program of this request sees; None where the host has no GPU that this process may use."""
    vendor = _vendor(host, request)
    if vendor is None:
        return None
    environ = {**request.environ, **dict(request.settings.env)}
    gpus = _allocated([gpu for gpu in host.gpus if gpu.vendor == vendor.name and gpu.accessible], vendor, environ)
    composite = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE"
    devices = _devices(gpus, composite=composite)
    limits, warnings, variable = [], [*_order_warnings(vendor, gpus, environ)], ""
    for names in vendor.hide:
        variable = next((name for name in names.split() if name in environ), names.split()[-1])
        if variable not in environ:
            continue
        left = [gpu for gpu in gpus if any(device.gpu == gpu.index for device in devices)]
        text = environ[variable]
        devices, wrong = _narrowed(vendor, devices, left, text, composite=composite)
        limits.append(f"{variable}={text}")
        warnings += [f"{variable}={text}: {wrong}"] if wrong else []
        if names != vendor.hide[-1]:
            devices = tuple(Device(device.gpu, str(index)) for index, device in enumerate(devices))
    return Visible(vendor, devices, variable, " ".join(limits), tuple(warnings))


def _allocated(gpus: Sequence[Gpu], vendor: Vendor, environ: Mapping[str, str]) -> Sequence[Gpu]:
    """The GPUs that the driver shows inside a Slurm job whose device cgroup forbids the others.

    There the list that Slurm sets counts the job's GPUs from 0, while SLURM_STEP_GPUS names those of the machine. Where
    both may be meant, the machine's are. (Where NVML was asked, only the job's GPUs are left here anyway.)
    Source: srun(1), SLURM_STEP_GPUS; sbatch(1), SLURM_JOB_GPUS; Slurm, gres.html, "CUDA_VISIBLE_DEVICES".
    """
    ids = [part.strip() for part in (environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or "").split(",")]
    listed = [part.strip() for part in environ.get(vendor.hide[0], "").split(",")]
    if len(gpus) <= len(ids) or not all(_is_index(each) and int(each) < len(gpus) for each in (*ids, *listed)):
        return gpus
    counted_from_0 = all(int(each) < len(ids) for each in listed) and not set(listed) <= set(ids)
    return [gpus[int(each)] for each in ids] if counted_from_0 else gpus


def _narrowed(
    vendor: Vendor, devices: tuple[Device, ...], gpus: Sequence[Gpu], text: str, *, composite: bool
) -> tuple[tuple[Device, ...], str]:
    """The devices that a variable's text leaves, and what is wrong with it ("" if nothing is)."""
    if vendor.name == "intel":
        return (devices, "") if text in UNMASKED else _masked(devices, text, composite=composite)
    return _listed(devices, gpus, text)


def _vendor(host: Host, request: LaunchRequest) -> Vendor | None:
    """Whose GPUs the job computes on: those that the worker's torch was built for, else the first vendor's."""
    asked = request.settings.nproc_per_node
    counted = COUNTED[asked] if asked == "gpu" or asked == "xpu" else ("nvidia", "amd", "intel")
    found = {gpu.vendor for gpu in host.gpus if gpu.accessible}.intersection(counted)
    present = [vendor for vendor in VENDORS if vendor.name in found]
    build = torch_build(host)
    return next((vendor for vendor in present if build.startswith(vendor.builds)), next(iter(present), None))


def torch_build(host: Host) -> str:
    """What the worker's torch was built for ("cu130", "rocm7.0", "xpu", "cpu"); "" if its version does not say."""
    return "" if host.torch is None else host.torch.version.partition("+")[2]


def _devices(gpus: Sequence[Gpu], *, composite: bool) -> tuple[Device, ...]:
    """Every device of these GPUs: one each, but for MIG devices and, unless Level Zero joins them, tiles."""
    found: list[Device] = []
    number = 0
    for position, gpu in enumerate(gpus):
        if gpu.mig:
            names = (each.uuid or f"MIG-{gpu.uuid}/{each.gpu_instance}/{each.compute_instance}" for each in gpu.mig)
            found += [Device(gpu.index, name, True) for name in names]
            continue
        for _ in range(1 if composite else gpu.tiles):
            found.append(Device(gpu.index, str(position if gpu.tiles == 1 or composite else number)))
            number += 1
    return tuple(found)


def _listed(devices: tuple[Device, ...], gpus: Sequence[Gpu], text: str) -> tuple[tuple[Device, ...], str]:
    """The devices that a list such as "2,3", "GPU-8932f937" or "MIG-…" names, and what is wrong with it.

    As in CUDA the first name that means nothing ends the list, and a repeated one makes it empty.
    """
    chosen: list[Device] = []
    for entry in (part.strip() for part in text.split(",")):
        device = _by_index(devices, gpus, entry) if entry[:1].isdigit() else _by_uuid(devices, gpus, entry)
        if device is None:
            wrong = f"there is no device {entry!r}, and the list ends there" if entry else ""
            return tuple(chosen), wrong
        if any(_same(device, other) for other in chosen):
            return (), f"{entry!r} is named twice, so the runtime shows no device"
        chosen.append(device)
    unknown = [device.name for device in chosen if device.gpu is None]
    return tuple(chosen), f"nothing tells where {unknown[0]} is (pip install 'cpulaunch[gpu]')" if unknown else ""


def _by_index(devices: Sequence[Device], gpus: Sequence[Gpu], entry: str) -> Device | None:
    """The device with a number among GPUs; of a GPU with MIG devices CUDA shows one."""
    if not _is_index(entry):
        return None
    if any(device.mig for device in devices):
        gpu = gpus[int(entry)] if int(entry) < len(gpus) else None
        return None if gpu is None else Device(gpu.index, entry, bool(gpu.mig))
    device = devices[int(entry)] if int(entry) < len(devices) else None
    return None if device is None else Device(device.gpu, entry)


def _same(one: Device, other: Device) -> bool:
    """Whether two names mean one device: 0 and its UUID, or two beginnings of a UUID."""
    whole = one.gpu is not None and not (one.mig or other.mig)
    return one.name == other.name or (whole and one.gpu == other.gpu)


def _is_index(entry: str) -> bool:
    """Whether this is a device's number, written as such."""
    return entry.isascii() and entry.isdigit() and len(entry) <= LONGEST_INDEX


def _by_uuid(devices: Sequence[Device], gpus: Sequence[Gpu], entry: str) -> Device | None:
    """The device whose UUID begins like this, if only one does; of unknown place if no UUID tells."""
    mig = entry.startswith("MIG-")
    if not mig and not entry.startswith("GPU-"):
        return None
    if mig:
        known = [(device.name, device.gpu) for device in devices if device.mig and device.gpu is not None]
        complete = all(each.uuid is not None for gpu in gpus for each in gpu.mig)
        owners = [gpu.index for gpu in gpus if gpu.uuid is not None and entry.startswith(f"MIG-{gpu.uuid}/")]
    else:
        known = [(gpu.uuid or "", gpu.index) for gpu in gpus]
        complete = all(gpu.uuid is not None for gpu in gpus)
        owners = []
    owners += [owner for name, owner in known if name.startswith(entry) and owner not in owners]
    if len(owners) == 1:
        return Device(owners[0], entry, mig)
    if owners or (complete and known):
        return None
    return Device(gpus[0].index if len(gpus) == 1 else None, entry, mig)


def _masked(devices: tuple[Device, ...], text: str, *, composite: bool) -> tuple[tuple[Device, ...], str]:
    """The devices of a Level Zero mask: numbers, or with COMPOSITE also CARD.TILE, whose card stays one device."""
    chosen: dict[str, Device] = {}
    for entry in (part.strip() for part in text.split(",")):
        card = entry.partition(".")[0] if composite else entry
        if not _is_index(card) or int(card) >= len(devices):
            return tuple(chosen.values()), f"there is no device {entry!r}" if entry else ""
        before = chosen.get(card)
        chosen[card] = Device(devices[int(card)].gpu, entry if before is None else f"{before.name},{entry}")
    return tuple(chosen.values()), ""


def _order_warnings(vendor: Vendor, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[str, ...]:
    """A warning where an index means another GPU to CUDA's own order, the fastest first, than to PCI's."""
    if vendor.name != "nvidia" or len({gpu.device for gpu in gpus}) < 2:
        return ()
    order = environ.get("CUDA_DEVICE_ORDER")
    if order is not None and order != "PCI_BUS_ID":
        return (f"CUDA_DEVICE_ORDER={order} and GPUs of several models: ranks may be bound next to another GPU",)
    listed = environ.get("CUDA_VISIBLE_DEVICES", "")
    if order is None and listed[:1].isdigit():
        return (
            f"CUDA_VISIBLE_DEVICES={listed} is read in PCI order, as nvidia-smi counts, and CUDA_DEVICE_ORDER says so "
            "to CUDA, which by itself puts the fastest of these different GPUs first",
        )
    return ()
