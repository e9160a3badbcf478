"""GPUs and processing accelerators as sysfs and the drivers' own files show them; no driver is asked.

Source: kernel, Documentation/ABI/testing/sysfs-bus-pci; PCI class codes (PCI Code and ID Assignment).
"""

from __future__ import annotations

from cpulaunch.records.host import Gpu, MigInstance
from cpulaunch.system.root import Root, natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICES = "sys/bus/pci/devices"
NVIDIA_GPUS = "proc/driver/nvidia/gpus"
MIG_CAPABILITIES = "proc/driver/nvidia/capabilities"
VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel"}
VGA, CONTROLLER_3D, OTHER_DISPLAY, ACCELERATOR = 0x0300, 0x0302, 0x0380, 0x1200
COMPUTE = (CONTROLLER_3D, OTHER_DISPLAY)
MAX_GPUS, MAX_MIG = 256, 64
"""GPUs of a machine; and of one of them, folders of instances, of which there are seven.

In a captured machine, each may be a link to one with thousands."""
LEAST_VRAM_BYTES = 4 << 30
"""Of an AMD graphics card worth computing on; a processor's built-in graphics is given less of the main memory."""


def read_gpus(root: Root) -> tuple[Gpu, ...]:
    """The machine's GPUs in PCI order.

    Graphics built into a processor (Intel's on bus 0, AMD's with little memory) and virtual functions are not GPUs.
    """
    found: list[Gpu] = []
    for address in sorted(root.names(DEVICES)):
        vendor = _vendor(root, address)
        if vendor is not None:
            found.append(_gpu(root, address, index=len(found), vendor=vendor))
        if len(found) == MAX_GPUS:
            break
    return tuple(found)


def _vendor(root: Root, address: str) -> str | None:
    base = f"{DEVICES}/{address}"
    number = _hexadecimal(root, f"{base}/class")
    kind = None if number is None else number >> 8
    if kind not in (VGA, *COMPUTE, ACCELERATOR):
        return None
    vendor = VENDORS.get(_hexadecimal(root, f"{base}/vendor") or 0)
    if vendor is None or root.exists(f"{base}/physfn"):
        return None
    if kind == ACCELERATOR:
        return vendor if vendor == "amd" else None
    return None if kind == VGA and _built_in(root, address, vendor) else vendor


def _built_in(root: Root, address: str, vendor: str) -> bool:
    """Whether a VGA controller is part of the processor.

    Source: kernel, Documentation/gpu/amdgpu/driver-misc.rst (mem_info_vram_total, bytes).
    """
    if vendor == "intel":
        return address.split(":")[1:2] == ["00"]
    vram = root.integer(f"{DEVICES}/{address}/mem_info_vram_total") if vendor == "amd" else None
    return vram is not None and vram < LEAST_VRAM_BYTES


def _gpu(root: Root, address: str, *, index: int, vendor: str) -> Gpu:
    base = f"{DEVICES}/{address}"
    node = root.integer(f"{base}/numa_node")
    listed = root.cpulist(f"{base}/local_cpulist")
    cpus = root.cpumask(f"{base}/local_cpus") if listed is None else listed
    own = _pairs(root.text(f"{NVIDIA_GPUS}/{address}/information")) if vendor == "nvidia" else {}
    serial = root.text(f"{base}/unique_id") if vendor == "amd" else None
    return Gpu(
        index=index,
        vendor=vendor,
        pci=address,
        uuid=own.get("GPU UUID") or (serial and f"GPU-{serial.lower()}"),
        numa_node=None if node is None or node < 0 else node,
        cpus=cpus or frozenset(),
        device=_hexadecimal(root, f"{base}/device"),
        model=own.get("Model") or root.text(f"{base}/product_name"),
        driver=_pairs(root.text(f"{base}/uevent"), "=").get("DRIVER"),
        accessible=_nvidia_accessible(root, own) if vendor == "nvidia" else _render_accessible(root, base),
        mig=tuple(sorted(_mig_instances(root, own), key=lambda each: (each.gpu_instance, each.compute_instance))),
        tiles=_tiles(root, base) if vendor == "intel" else 1,
    )


def _pairs(text: str | None, sign: str = ":") -> dict[str, str]:
    """The lines "NAME: VALUE" of a file."""
    pairs = (line.partition(sign) for line in (text or "").splitlines())
    return {name.strip(): value.strip() for name, found, value in pairs if found}


def _nvidia_accessible(root: Root, own: dict[str, str]) -> bool:
    """Whether the driver has the GPU and its device file is here.

    Containers see every GPU in sysfs, but the driver's files and /dev/nvidiaN of those they were given only. Without
    /dev/nvidiactl the driver has not been used since the boot, and its first use creates the files.
    Source: nvidia-container-toolkit; NVIDIA driver README, "Device nodes".
    """
    if not own:
        return not root.live and not root.exists(NVIDIA_GPUS)
    minor = own.get("Device Minor")
    return minor is None or not root.exists("dev/nvidiactl") or root.exists(f"dev/nvidia{minor}")


def _render_accessible(root: Root, base: str) -> bool:
    """Whether one of the device's render nodes is here; a captured machine without /dev says nothing against it."""
    if not root.exists("dev/dri"):
        return not root.live
    return any(root.exists(f"dev/dri/{name}") for name in root.names(f"{base}/drm") if name.startswith("renderD"))


def _mig_instances(root: Root, own: dict[str, str]) -> Iterator[MigInstance]:
    """The MIG devices of a GPU, by the folders gpuMINOR/mig/giN/ciM.

    Source: NVIDIA Multi-Instance GPU user guide, "Device nodes and capabilities".
    """
    if "Device Minor" not in own:
        return
    base = f"{MIG_CAPABILITIES}/gpu{own['Device Minor']}/mig"
    for outer in root.names(base)[:MAX_MIG]:
        for inner in root.names(f"{base}/{outer}")[:MAX_MIG]:
            first = natural(outer.removeprefix("gi")) if outer.startswith("gi") else None
            second = natural(inner.removeprefix("ci")) if inner.startswith("ci") else None
            if first is not None and second is not None:
                yield MigInstance(gpu_instance=first, compute_instance=second)


def _tiles(root: Root, base: str) -> int:
    """Tiles of an Intel GPU: folders tileN under xe, drm/cardN/gt/gtN under i915; at least 1."""
    tiles = sum(name.startswith("tile") and name[4:].isdigit() for name in root.names(base))
    for card in root.names(f"{base}/drm"):
        if card.startswith("card"):
            tiles = tiles or sum(name.startswith("gt") for name in root.names(f"{base}/drm/{card}/gt"))
    return max(1, tiles)


def _hexadecimal(root: Root, name: str) -> int | None:
    text = root.text(name)
    try:
        return None if text is None else int(text, 16)
    except ValueError:
        raise root.malformed("hexadecimal number", text, name) from None
