"""What only NVIDIA's management library knows: the names of MIG devices, and which GPUs a device cgroup leaves.

It starts the driver, which takes up to a second where nothing keeps it running: it is asked for jobs that may want
GPUs, and by doctor.
"""

from __future__ import annotations

from cpulaunch.records.host import Gpu, Host, MigInstance
from cpulaunch.records.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, TypeVar

    T = TypeVar("T", Host, Gpu)

MIG_ENABLED = 1
"""Source: nvml.h, NVML_DEVICE_MIG_ENABLE."""


def with_nvml(host: Host) -> Host:
    """The host with what NVML adds about its GPUs; the same if nvidia-ml-py is not installed.

    Effect: loads libnvidia-ml and starts the driver.
    """
    if host.sysroot is not None or not any(gpu.vendor == "nvidia" and gpu.accessible for gpu in host.gpus):
        return host
    try:
        import pynvml
    except ImportError:
        return host
    return replace(host, gpus=named_gpus(host.gpus, pynvml))


def named_gpus(gpus: Sequence[Gpu], nvml: Any) -> tuple[Gpu, ...]:
    """The GPUs with UUIDs and MIG devices from `nvml`, the module pynvml; unchanged where the driver refuses.

    A GPU of NVIDIA's that it does not list is not open to this process: Slurm may forbid it by a device cgroup.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return tuple(gpus)
    try:
        answers = dict(_answers(nvml))
    except nvml.NVMLError:
        return tuple(gpus)
    finally:
        nvml.nvmlShutdown()
    unlisted: dict[str, object] = {"accessible": False}
    return tuple(replace(gpu, **answers.get(gpu.pci, unlisted)) if gpu.vendor == "nvidia" else gpu for gpu in gpus)


def _answers(nvml: Any) -> Iterator[tuple[str, dict[str, object]]]:
    """By PCI address as sysfs writes it, what NVML says of each GPU."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        domain, _, rest = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
        known: dict[str, object] = {"uuid": _text(nvml.nvmlDeviceGetUUID(handle))}
        if mig := tuple(_mig(nvml, handle)):
            known["mig"] = mig
        yield f"{int(domain, 16):04x}:{rest}", known


def _mig(nvml: Any, handle: Any) -> Iterator[MigInstance]:
    try:
        enabled = nvml.nvmlDeviceGetMigMode(handle)[0] == MIG_ENABLED
    except nvml.NVMLError:
        return
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if enabled else 0):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:
            continue
        yield MigInstance(
            gpu_instance=nvml.nvmlDeviceGetGpuInstanceId(device),
            compute_instance=nvml.nvmlDeviceGetComputeInstanceId(device),
            uuid=_text(nvml.nvmlDeviceGetUUID(device)),
        )


def _text(value: bytes | str) -> str:
    """NVML's text; old versions of its bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
