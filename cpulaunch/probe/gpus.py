"""GPUs and processing accelerators as sysfs shows them; no driver is asked.

Source: kernel, Documentation/ABI/testing/sysfs-bus-pci; PCI class codes (PCI Code and ID Assignment).
"""

from cpulaunch.host import Gpu
from cpulaunch.probe.root import Root

DEVICES = "sys/bus/pci/devices"
VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel"}
VGA, CONTROLLER_3D, OTHER_DISPLAY, ACCELERATOR = 0x0300, 0x0302, 0x0380, 0x1200
COMPUTE = (CONTROLLER_3D, OTHER_DISPLAY)


def read_gpus(root: Root) -> tuple[Gpu, ...]:
    """The machine's GPUs in PCI order. A processor's built-in Intel graphics (VGA on bus 0) is not one."""
    found: list[Gpu] = []
    for address in sorted(root.names(DEVICES)):
        vendor = _vendor(root, address)
        if vendor is not None:
            found.append(_gpu(root, address, index=len(found), vendor=vendor))
    return tuple(found)


def _vendor(root: Root, address: str) -> str | None:
    number = _hexadecimal(root, f"{DEVICES}/{address}/class")
    kind = None if number is None else number >> 8
    if kind not in (VGA, *COMPUTE, ACCELERATOR):
        return None
    vendor = VENDORS.get(_hexadecimal(root, f"{DEVICES}/{address}/vendor") or 0)
    if kind == ACCELERATOR:
        return vendor if vendor == "amd" else None
    built_in = vendor == "intel" and kind == VGA and address.split(":")[1:2] == ["00"]
    return None if built_in else vendor


def _gpu(root: Root, address: str, *, index: int, vendor: str) -> Gpu:
    base = f"{DEVICES}/{address}"
    node = root.integer(f"{base}/numa_node")
    listed = root.cpulist(f"{base}/local_cpulist")
    cpus = root.cpumask(f"{base}/local_cpus") if listed is None else listed
    return Gpu(
        index=index,
        vendor=vendor,
        pci=address,
        uuid=_nvidia_uuid(root, address) if vendor == "nvidia" else None,
        numa_node=None if node is None or node < 0 else node,
        cpus=cpus or frozenset(),
    )


def _nvidia_uuid(root: Root, address: str) -> str | None:
    """The "GPU UUID" line of the driver's own file, if the driver is loaded."""
    text = root.text(f"proc/driver/nvidia/gpus/{address}/information") or ""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() == "GPU UUID"), None)


def _hexadecimal(root: Root, name: str) -> int | None:
    text = root.text(name)
    try:
        return None if text is None else int(text, 16)
    except ValueError:
        raise root.malformed("hexadecimal number", text, name) from None
