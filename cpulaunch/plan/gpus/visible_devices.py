"""The devices that a program of this job sees, in its own order: the host's GPUs less those that variables hide.

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
    """How the runtimes of one vendor number and hide devices.

    `order_variables`: names, values and reasons of variables that make a program number devices as this plan does.
    `hiding_variables`: alternatives for each step of hiding devices, the first that is set counts; a later step
    numbers the devices that the steps before it leave. `build_prefix`: how torch's version names builds for it.
    """

    name: str
    order_variables: tuple[tuple[str, str, str], ...]
    hiding_variables: tuple[tuple[str, ...], ...]
    build_prefix: str


VENDORS = (
    Vendor(
        "nvidia",
        (("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "cuda:N is the GPU with index N in PCI order, as in nvidia-smi"),),
        (("CUDA_VISIBLE_DEVICES",),),
        "cu",
    ),
    Vendor("amd", (), (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")), "rocm"),
    Vendor(
        "intel",
        (
            ("ZE_ENABLE_PCI_ID_DEVICE_ORDER", "1", "xpu:N is the GPU with index N in PCI order"),
            ("ZE_FLAT_DEVICE_HIERARCHY", "FLAT", "every tile is a device, the default of Level Zero"),
        ),
        (("ZE_AFFINITY_MASK",),),
        "xpu",
    ),
)


VENDORS_OF_WORD = {"gpu": ("nvidia", "amd"), "xpu": ("intel",)}
"""The vendors whose GPUs a word of --nproc-per-node counts. Source: torch 2.13, torch/distributed/run.py."""
UNMASKED = ("", "default")
"""Level Zero masks that hide nothing. Source: Intel's compute-runtime, ExecutionEnvironment::parseAffinityMask."""
LONGEST_INDEX = 4
"""Most digits of a device number; a longer number names no device."""


@record(kw_only=False)
class Device:
    """What a program sees as one device.

    `gpu`: the index of the host's GPU that it is on; None: unknown. `name`: its name in `VisibleDevices.variable`.
    """

    gpu: int | None
    name: str
    mig: bool = False


@record(kw_only=False)
class VisibleDevices:
    """The devices in the order of the program's indexes, and the variable that restricts a process to some of them.

    `restricted_by`: the user's variables that hide devices ("CUDA_VISIBLE_DEVICES=2,3"); "" if none is set.
    """

    vendor: Vendor
    devices: tuple[Device, ...]
    variable: str
    restricted_by: str = ""
    warnings: tuple[str, ...] = ()


def visible_devices(host: Host, request: LaunchRequest) -> VisibleDevices | None:
    """The devices that a program of this request sees; None if the host has no GPU that this process may use."""
    vendor = _vendor(host, request)
    if vendor is None:
        return None
    environ = {**request.environ, **dict(request.settings.env)}
    gpus = _allocated([gpu for gpu in host.gpus if gpu.vendor == vendor.name and gpu.accessible], vendor, environ)
    composite = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE"
    devices = _devices(gpus, composite=composite)
    restrictions, warnings, variable = [], [*_order_warnings(vendor, gpus, environ)], ""
    for alternatives in vendor.hiding_variables:
        variable = next((name for name in alternatives if name in environ), alternatives[-1])
        if variable not in environ:
            continue
        left = [gpu for gpu in gpus if any(device.gpu == gpu.index for device in devices)]
        text = environ[variable]
        devices, problem = _restricted(vendor, devices, left, text, composite=composite)
        restrictions.append(f"{variable}={text}")
        warnings += [f"{variable}={text}: {problem}"] if problem else []
        if alternatives != vendor.hiding_variables[-1]:
            devices = tuple(Device(device.gpu, str(index)) for index, device in enumerate(devices))
    return VisibleDevices(vendor, devices, variable, " ".join(restrictions), tuple(warnings))


def _allocated(gpus: Sequence[Gpu], vendor: Vendor, environ: Mapping[str, str]) -> Sequence[Gpu]:
    """The GPUs that the driver shows inside a Slurm job whose device cgroup hides the others.

    The list that Slurm sets numbers the job's GPUs from 0, while SLURM_STEP_GPUS has their numbers on the machine. A
    list that fits both readings is read as numbers on the machine. (With NVML, `gpus` holds only the job's GPUs.)
    Source: srun(1), SLURM_STEP_GPUS; sbatch(1), SLURM_JOB_GPUS; Slurm, gres.html, "CUDA_VISIBLE_DEVICES".
    """
    ids = [part.strip() for part in (environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or "").split(",")]
    listed = [part.strip() for part in environ.get(vendor.hiding_variables[0][0], "").split(",")]
    if len(gpus) <= len(ids) or not all(_is_index(each) and int(each) < len(gpus) for each in (*ids, *listed)):
        return gpus
    counted_from_0 = all(int(each) < len(ids) for each in listed) and not set(listed) <= set(ids)
    return [gpus[int(each)] for each in ids] if counted_from_0 else gpus


def _restricted(
    vendor: Vendor, devices: tuple[Device, ...], gpus: Sequence[Gpu], text: str, *, composite: bool
) -> tuple[tuple[Device, ...], str]:
    """The devices that a variable's text leaves visible, and the problem with the text ("" if none)."""
    if vendor.name == "intel":
        return (devices, "") if text in UNMASKED else _masked(devices, text, composite=composite)
    return _listed(devices, gpus, text)


def _vendor(host: Host, request: LaunchRequest) -> Vendor | None:
    """The vendor of the GPUs that the job computes on: the one the worker's torch was built for, else the first."""
    nproc = request.settings.nproc_per_node
    counted = VENDORS_OF_WORD[nproc] if nproc == "gpu" or nproc == "xpu" else ("nvidia", "amd", "intel")
    found = {gpu.vendor for gpu in host.gpus if gpu.accessible}.intersection(counted)
    present = [vendor for vendor in VENDORS if vendor.name in found]
    build = torch_build(host)
    return next((vendor for vendor in present if build.startswith(vendor.build_prefix)), next(iter(present), None))


def torch_build(host: Host) -> str:
    """What the worker's torch is built for ("cu130", "rocm7.0", "xpu", "cpu"); "" if its version does not name it."""
    return "" if host.torch is None else host.torch.version.partition("+")[2]


def _devices(gpus: Sequence[Gpu], *, composite: bool) -> tuple[Device, ...]:
    """The devices of these GPUs: one each, or its MIG devices, or its tiles unless Level Zero joins them."""
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
    """The devices that a list such as "2,3", "GPU-8932f937" or "MIG-…" names, and the problem with it ("" if none).

    As in CUDA, the first unknown name ends the list, and a repeated name makes it empty.
    """
    chosen: list[Device] = []
    for entry in (part.strip() for part in text.split(",")):
        device = _by_index(devices, gpus, entry) if entry[:1].isdigit() else _by_uuid(devices, gpus, entry)
        if device is None:
            return tuple(chosen), f"device {entry!r} does not exist, so the runtime ignores the rest" if entry else ""
        if any(_same(device, other) for other in chosen):
            return (), f"{entry!r} is listed twice, so the runtime shows no device"
        chosen.append(device)
    unknown = [device.name for device in chosen if device.gpu is None]
    return tuple(
        chosen
    ), f"cannot determine which GPU {unknown[0]} is on (pip install 'cpulaunch[gpu]')" if unknown else ""


def _by_index(devices: Sequence[Device], gpus: Sequence[Gpu], entry: str) -> Device | None:
    """The device with this number; None if there is none. CUDA shows one device of a GPU with MIG devices."""
    if not _is_index(entry):
        return None
    if any(device.mig for device in devices):
        gpu = gpus[int(entry)] if int(entry) < len(gpus) else None
        return None if gpu is None else Device(gpu.index, entry, bool(gpu.mig))
    device = devices[int(entry)] if int(entry) < len(devices) else None
    return None if device is None else Device(device.gpu, entry)


def _same(one: Device, other: Device) -> bool:
    """Whether two names stand for the same device: 0 and its UUID, or two prefixes of a UUID."""
    whole = one.gpu is not None and not (one.mig or other.mig)
    return one.name == other.name or (whole and one.gpu == other.gpu)


def _is_index(entry: str) -> bool:
    """Whether the text is a device number."""
    return entry.isascii() and entry.isdigit() and len(entry) <= LONGEST_INDEX


def _by_uuid(devices: Sequence[Device], gpus: Sequence[Gpu], entry: str) -> Device | None:
    """The device whose UUID has this prefix; None if no device or several have it.

    Its GPU is None if not all UUIDs are known.
    """
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
    """The devices of a Level Zero mask, and the problem with it ("" if none).

    Entries are numbers, or with COMPOSITE also CARD.TILE; the tiles of one card stay one device.
    """
    chosen: dict[str, Device] = {}
    for entry in (part.strip() for part in text.split(",")):
        card = entry.partition(".")[0] if composite else entry
        if not _is_index(card) or int(card) >= len(devices):
            return tuple(chosen.values()), f"device {entry!r} does not exist" if entry else ""
        before = chosen.get(card)
        chosen[card] = Device(devices[int(card)].gpu, entry if before is None else f"{before.name},{entry}")
    return tuple(chosen.values()), ""


def _order_warnings(vendor: Vendor, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[str, ...]:
    """A warning if CUDA's own order, the fastest GPU first, gives an index to another GPU than the PCI order does."""
    if vendor.name != "nvidia" or len({gpu.device for gpu in gpus}) < 2:
        return ()
    order = environ.get("CUDA_DEVICE_ORDER")
    if order is not None and order != "PCI_BUS_ID":
        return (f"CUDA_DEVICE_ORDER={order} with GPUs of several models: ranks may be bound next to the wrong GPU",)
    listed = environ.get("CUDA_VISIBLE_DEVICES", "")
    if order is None and listed[:1].isdigit():
        return (
            f"CUDA_VISIBLE_DEVICES={listed} is read in PCI order, as in nvidia-smi; CUDA_DEVICE_ORDER makes CUDA do "
            "the same, whose own order puts the fastest of these different GPUs first",
        )
    return ()
