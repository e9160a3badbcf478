"""Machines with GPUs, as the files that their kernels and drivers show."""

from collections.abc import Mapping, Sequence
from typing import Any

from cpulaunch.records.cpulist import format_cpulist
from tests.roots import EPYC, GRACE, RootSpec

NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"
DRIVERS = {NVIDIA: "nvidia", AMD: "amdgpu", INTEL: "xe"}
CLASSES = {NVIDIA: "0x030200", AMD: "0x120000", INTEL: "0x038000"}


def gpu(pci: str, node: int, cpus: str, *, vendor: str = NVIDIA, device: str = "0x2330", **more: str) -> dict[str, str]:
    """One device under sysfs; `more` are files beside its own."""
    files = {
        "class": CLASSES[vendor],
        "vendor": vendor,
        "device": device,
        "numa_node": str(node),
        "local_cpulist": cpus,
        "uevent": f"DRIVER={DRIVERS[vendor]}\nPCI_SLOT_NAME={pci}",
        **more,
    }
    driver = {f"sys/bus/pci/drivers/{DRIVERS[vendor]}/bind": ""}
    return driver | {f"sys/bus/pci/devices/{pci}/{name}": text for name, text in files.items()}


def driver_files(pcis: Sequence[str], *, minors: Sequence[int] = (), uuids: bool = True) -> dict[str, str]:
    """The files of NVIDIA's driver on its GPUs in /proc."""
    files = {}
    for minor, pci in zip(minors or range(len(pcis)), pcis, strict=False):
        uuid = f"GPU UUID:\t GPU-{minor:08x}-aaaa-bbbb-cccc-0123456789ab\n" if uuids else ""
        text = f"Model: \t\t NVIDIA H100\n{uuid}Device Minor: \t {minor}\n"
        files[f"proc/driver/nvidia/gpus/{pci}/information"] = text
    return files


def mig(minor: int, count: int) -> dict[str, str]:
    """The capabilities of a GPU cut into so many MIG devices."""
    base = f"proc/driver/nvidia/capabilities/gpu{minor}/mig"
    return {f"{base}/gi{number + 7}/ci0/access": "DeviceFileMinor: 66" for number in range(count)}


def _merged(parts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {name: text for part in parts for name, text in part.items()}


DGX_H100_PCI = [f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")]
SOCKET_CPUS = ("0-55,112-167", "56-111,168-223")
DGX_H100_FILES = _merged(
    [gpu(pci, place // 4, SOCKET_CPUS[place // 4]) for place, pci in enumerate(DGX_H100_PCI)]
) | driver_files(DGX_H100_PCI)
DGX_H100 = RootSpec(sockets=2, cores_per_l3=56, smt=2, files=DGX_H100_FILES)
"""8 GPUs on 2 sockets."""


SMALL_CPUS = ("0-7,16-23", "8-15,24-31")
SMALL_FILES = _merged([gpu(pci, place // 4, SMALL_CPUS[place // 4]) for place, pci in enumerate(DGX_H100_PCI)])


def small(**more: Any) -> RootSpec:
    """8 GPUs on 2 sockets of 8 cores, with something else about it; `files` are added."""
    return RootSpec(sockets=2, cores_per_l3=8, smt=2, files=SMALL_FILES | more.pop("files", {}), **more)


def _node_cpus(node: int, cores: int, total: int) -> str:
    first = range(node * cores, (node + 1) * cores)
    return format_cpulist({*first, *(cpu + total for cpu in first)})


DGX_A100_PLACES = {"07": 3, "0f": 3, "47": 1, "4e": 1, "87": 7, "90": 7, "b7": 5, "bd": 5}
DGX_A100 = RootSpec(
    sockets=2,
    numa_per_socket=4,
    l3_per_numa=2,
    cores_per_l3=8,
    smt=2,
    cpu=EPYC,
    files=_merged([gpu(f"0000:{bus}:00.0", node, _node_cpus(node, 16, 128)) for bus, node in DGX_A100_PLACES.items()]),
)
"""8 GPUs on 4 of 8 NUMA nodes (NPS4), not in the order of the nodes."""

LUMI_PLACES = {"c1": 3, "c6": 3, "c9": 1, "ce": 1, "d1": 0, "d6": 0, "d9": 2, "dc": 2}
LUMI = RootSpec(
    numa_per_socket=4,
    l3_per_numa=2,
    cores_per_l3=8,
    smt=2,
    cpu=EPYC,
    files=_merged(
        [
            gpu(f"0000:{bus}:00.0", node, _node_cpus(node, 16, 64), vendor=AMD, **{"class": "0x038000"})
            for bus, node in LUMI_PLACES.items()
        ]
    ),
)
"""4 cards, each two devices, on 4 NUMA nodes in another order than the nodes'."""

MI300A = RootSpec(
    sockets=4,
    cores_per_l3=8,
    l3_per_numa=3,
    cpu=EPYC,
    files=_merged(
        [
            gpu(
                f"000{node}:01:00.0",
                node,
                format_cpulist(range(node * 24, node * 24 + 24)),
                vendor=AMD,
                device="0x74a0",
                unique_id=f"{node:016x}",
            )
            for node in (2, 0, 3, 1)
        ]
    ),
)
"""4 GPUs on 4 NUMA nodes."""

GB200_PLACES = {"0008:01:00.0": 0, "0009:01:00.0": 0, "0018:01:00.0": 1, "0019:01:00.0": 1}
GB200 = RootSpec(
    sockets=2,
    cores_per_l3=72,
    memory_only=4,
    node_ids=(0, 1, 10, 18, 26, 34),
    cpu=GRACE,
    files=_merged(
        [
            gpu(pci, node, format_cpulist(range(node * 72, node * 72 + 72)), device="0x2941")
            for pci, node in GB200_PLACES.items()
        ]
    ),
)
"""2 sockets of 72 cores; the memory of the 4 GPUs is 4 NUMA nodes more, without CPUs."""

NODE = "sys/devices/system/node"
GB200_BY_MEMORY = RootSpec(
    sockets=2,
    cores_per_l3=72,
    memory_only=4,
    node_ids=(0, 1, 10, 18, 26, 34),
    cpu=GRACE,
    files=_merged([gpu(pci, node, "") for pci, node in zip(GB200_PLACES, (10, 18, 26, 34), strict=True)])
    | {f"{NODE}/node{node}/distance": "80 120 10 40 40 40" for node in (10, 18)}
    | {f"{NODE}/node{node}/distance": "120 80 40 40 10 40" for node in (26, 34)},
)
"""The same where the firmware puts each GPU on the NUMA node of its own memory."""

AURORA = RootSpec(
    sockets=2,
    cores_per_l3=52,
    smt=2,
    files=_merged(
        [
            gpu(
                f"0000:{bus}:00.0",
                place // 3,
                _node_cpus(place // 3, 52, 104),
                vendor=INTEL,
                device="0x0bd6",
                **{"tile0/id": "0", "tile1/id": "1"},
            )
            for place, bus in enumerate(("18", "42", "6c", "9a", "c4", "ee"))
        ]
    ),
)
"""6 Ponte Vecchio cards of two tiles."""

VM = RootSpec(
    cores_per_l3=16,
    smt=2,
    files=gpu("0000:00:05.0", -1, "0-31") | gpu("0000:00:06.0", -1, "0-31"),
)
"""A virtual machine that does not say where its GPUs are."""

WORKSTATION = RootSpec(
    cores_per_l3=16,
    files=gpu("0000:01:00.0", -1, "0-15", device="0x2204", **{"class": "0x030000"})
    | gpu("0000:02:00.0", -1, "0-15", device="0x1d01", **{"class": "0x030000"}),
)
"""Two different graphics cards."""

ONE_MIG = RootSpec(
    cores_per_l3=16,
    files=gpu("0000:17:00.0", 0, "0-15") | driver_files(["0000:17:00.0"]) | mig(0, 7),
)
"""One GPU cut into 7 MIG devices; only NVML would know their names."""

GIVEN = [DGX_H100_PCI[2], DGX_H100_PCI[5]]
SHAPES = {
    "dgx-h100": DGX_H100,
    "dgx-a100-nps4": DGX_A100,
    "lumi": LUMI,
    "mi300a": MI300A,
    "gb200": GB200,
    "gb200-by-memory": GB200_BY_MEMORY,
    "aurora": AURORA,
    "vm": VM,
    "vm-two-nodes": RootSpec(sockets=2, cores_per_l3=8, files=gpu("0000:00:05.0", -1, "0-15")),
    "workstation": WORKSTATION,
    "mig-7": ONE_MIG,
    "one-socket-cpuset": small(cgroup="v2", cpuset=SMALL_CPUS[0]),
    "two-cores": small(affinity="0-1"),
    "quota": small(cgroup="v2", quota_cpus=16.0),
    "pod-with-two-gpus": small(
        files=driver_files(GIVEN, minors=(2, 5)) | {"dev/nvidiactl": "", "dev/nvidia2": "", "dev/nvidia5": ""}
    ),
    "no-gpu": RootSpec(sockets=2, cores_per_l3=4),
    "no-driver": RootSpec(
        cores_per_l3=4,
        files={
            "sys/bus/pci/drivers/nvidia/bind": "",
            "sys/bus/pci/devices/0000:17:00.0/class": "0x030200",
            "sys/bus/pci/devices/0000:17:00.0/vendor": NVIDIA,
            "proc/driver/nvidia/gpus/version": "",
        },
    ),
}
