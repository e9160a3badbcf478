"""CPUs and their groups on machines of every shape."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.probe.caches import MAX_CACHES
from cpulaunch.probe.numa import MAX_NODES
from cpulaunch.records.cpulist import MAX_ID, format_cpulist
from cpulaunch.records.errors import ProbeError
from cpulaunch.records.host import Host
from tests.roots import EPYC, GRACE, MemoryRoot, RootSpec, host_of, write_root

CPU = "sys/devices/system/cpu"


def groups(host: Host, name: str) -> dict[int | None, str]:
    members: dict[int | None, list[int]] = {}
    for cpu in host.cpus:
        members.setdefault(getattr(cpu, name), []).append(cpu.id)
    return {key: format_cpulist(ids) for key, ids in members.items()}


@pytest.mark.parametrize(
    ("numbering", "cores"),
    [
        ("linux", {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7"}),
        ("adjacent", {0: "0-1", 2: "2-3", 4: "4-5", 6: "6-7"}),
        ("interleaved", {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7"}),
    ],
)
def test_siblings_are_read_from_files_for_every_numbering(numbering: str, cores: dict[int, str]) -> None:
    host = host_of(RootSpec(sockets=2, cores_per_l3=2, smt=2, numbering=numbering))  # type: ignore[arg-type]
    assert groups(host, "core") == cores
    expected = {"interleaved": {0: "0,2,4,6", 1: "1,3,5,7"}, "adjacent": {0: "0-3", 4: "4-7"}}
    assert groups(host, "socket") == expected.get(numbering, {0: "0-1,4-5", 2: "2-3,6-7"})


def test_masks_give_the_same_topology_as_lists() -> None:
    spec = RootSpec(sockets=2, numa_per_socket=2, l3_per_numa=2, cores_per_l3=5, smt=2, offline="3,40")
    masks = host_of(replace(spec, hex_masks_only=True))
    assert replace(masks, sysroot=None) == replace(host_of(spec), sysroot=None)


def test_l3_inside_numa_node_inside_socket() -> None:
    host = host_of(RootSpec(sockets=2, numa_per_socket=2, l3_per_numa=2, cores_per_l3=2))
    assert groups(host, "l3") == {low: f"{low}-{low + 1}" for low in range(0, 16, 2)}
    assert groups(host, "numa_node") == {0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15"}
    assert groups(host, "socket") == {0: "0-7", 8: "8-15"}


def test_offline_cpus_are_left_out_and_named() -> None:
    host = host_of(RootSpec(cores_per_l3=4, smt=2, offline="0,5"))
    assert [cpu.id for cpu in host.cpus] == [1, 2, 3, 4, 6, 7]
    assert host.offline_cpus == {0, 5}
    assert groups(host, "core") == {1: "1", 2: "2,6", 3: "3,7", 4: "4"}
    assert host.numa_nodes[0].cpus == {1, 2, 3, 4, 6, 7}


def test_a_group_is_named_by_its_lowest_cpu_even_if_that_is_offline(tmp_path: Path) -> None:
    root = write_root(tmp_path, RootSpec(cores_per_l3=2, smt=2, offline="0"))
    (root / f"{CPU}/cpu2/topology/thread_siblings_list").write_text("0,2\n")
    assert groups(probe_host(Root(str(root))), "core") == {0: "2", 1: "1,3"}


def test_without_online_files_directories_and_their_online_switches_are_used(tmp_path: Path) -> None:
    root = write_root(tmp_path, RootSpec(cores_per_l3=4, offline="2"))
    for name in ("online", "present", "possible"):
        (root / CPU / name).unlink()
    host = probe_host(Root(str(root)))
    assert [cpu.id for cpu in host.cpus] == [0, 1, 3]
    assert host.offline_cpus == {2}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"proc/stat": "cpu  1 2\ncpu0 1 2\ncpu4 1 2\nintr 1"}, [0, 4]),
        ({"proc/cpuinfo": "processor\t: 0\n\nprocessor\t: 3\n"}, [0, 3]),
        ({}, [0]),
    ],
)
def test_without_sysfs_cpuinfo_is_used_and_there_is_at_least_one_cpu(
    tmp_path: Path, files: dict[str, str], ids: list[int]
) -> None:
    (tmp_path / "proc").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    host = probe_host(Root(str(tmp_path)))
    assert [cpu.id for cpu in host.cpus] == ids
    assert {cpu.socket for cpu in host.cpus} == {ids[0]}
    assert host.numa_nodes == ()


def test_contradictory_sockets_are_resolved_by_package_ids(tmp_path: Path) -> None:
    root = write_root(tmp_path, RootSpec(sockets=2, cores_per_l3=2))
    (root / f"{CPU}/cpu2/topology/core_siblings_list").write_text("1-3\n")
    assert groups(probe_host(Root(str(root))), "socket") == {0: "0-1", 2: "2-3"}
    for cpu in range(4):
        (root / f"{CPU}/cpu{cpu}/topology/physical_package_id").write_text("-1\n")
    assert groups(probe_host(Root(str(root))), "socket") == {0: "0-1", 2: "2-3"}


@pytest.mark.parametrize(
    ("packages", "sockets"),
    [
        ((0, 0, 1, 1), {0: "0-3", 4: "4-7"}),
        ((0, 1, 0, 1), {0: "0-1,4-5", 2: "2-3,6-7"}),
        ((3, 3, 3, 3), {0: "0-7"}),
        ((0, 0, -1, -1), {0: "0-1", 2: "2-3", 4: "4-5", 6: "6-7"}),
    ],
)
def test_sibling_lists_that_end_at_a_numa_node_do_not_split_a_package(
    packages: tuple[int, ...], sockets: dict[int | None, str]
) -> None:
    files = {f"{CPU}/cpu{cpu}/topology/physical_package_id": str(packages[cpu // 2]) for cpu in range(8)}
    assert groups(host_of(RootSpec(sockets=4, cores_per_l3=2, files=files)), "socket") == sockets


def test_a_sibling_list_of_all_cpus_does_not_join_packages() -> None:
    files = {f"{CPU}/cpu{cpu}/topology/core_siblings_list": "0-7" for cpu in range(8)}
    assert groups(host_of(RootSpec(sockets=2, cores_per_l3=4, files=files)), "socket") == {0: "0-3", 4: "4-7"}


def test_without_sibling_lists_package_ids_make_sockets(tmp_path: Path) -> None:
    root = write_root(tmp_path, RootSpec(sockets=2, cores_per_l3=2))
    for path in root.glob(f"{CPU}/cpu*/topology/core_siblings*"):
        path.unlink()
    assert groups(probe_host(Root(str(root))), "socket") == {0: "0-1", 2: "2-3"}


def test_package_ids_repeat_in_other_books() -> None:
    files = {f"{CPU}/cpu{cpu}/topology/book_id": str(cpu // 2) for cpu in range(4)}
    files |= {f"{CPU}/cpu{cpu}/topology/physical_package_id": "0" for cpu in range(4)}
    assert groups(host_of(RootSpec(sockets=2, cores_per_l3=2, files=files)), "socket") == {0: "0-1", 2: "2-3"}


def test_dies_and_cores_end_at_their_socket() -> None:
    files = {f"{CPU}/cpu{cpu}/topology/die_id": "0" for cpu in range(4)}
    files |= {f"{CPU}/cpu{cpu}/topology/die_cpus_list": "0-3" for cpu in range(4)}
    files |= {f"{CPU}/cpu{cpu}/topology/thread_siblings_list": "1-2" for cpu in (1, 2)}
    host = host_of(RootSpec(sockets=2, cores_per_l3=2, files=files))
    assert groups(host, "die") == {0: "0-1", 2: "2-3"}
    assert groups(host, "core") == {0: "0", 1: "1", 2: "2", 3: "3"}


@pytest.mark.parametrize("detail", ["launch", "full"])
def test_an_l3_never_parts_a_core(detail: Literal["launch", "full"]) -> None:
    masks = {0: "1", 1: "6", 2: "6", 3: "8"}
    files = {f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_map": mask for cpu, mask in masks.items()}
    host = host_of(RootSpec(cores_per_l3=2, smt=2, files=files), detail=detail)  # Cores 0,2 and 1,3.
    assert groups(host, "l3") == {0: "0-3"}
    assert [cache.cpus for cache in host.caches if cache.level == 3] == [frozenset(range(4))]


@pytest.mark.parametrize(("die_id", "dies"), [("0", {0: "0-1", 2: "2-3"}), ("-1", {None: "0-3"})])
def test_dies(tmp_path: Path, die_id: str, dies: dict[int | None, str]) -> None:
    files = {f"{CPU}/cpu{cpu}/topology/die_id": die_id for cpu in range(4)}
    files |= {f"{CPU}/cpu{cpu}/topology/die_cpus_list": "0-1" if cpu < 2 else "2-3" for cpu in range(4)}
    assert groups(host_of(RootSpec(cores_per_l3=4, files=files)), "die") == dies


def test_intel_hybrid_cores() -> None:
    host = host_of(RootSpec(cores_per_l3=2, smt=2, efficiency_cores=4))
    assert groups(host, "kind") == {"performance": "0-3", "efficiency": "4-7"}
    low_power = host_of(RootSpec(cores_per_l3=2, efficiency_cores=2, files={"sys/devices/cpu_lowpower/cpus": "0"}))
    assert groups(low_power, "kind") == {"efficiency": "0,2-3", "performance": "1"}


@pytest.mark.parametrize(
    ("capacities", "kinds"),
    [
        ((325, 325, 830, 1024), {"efficiency": "0-1", "performance": "2-3"}),
        ((1024, 1024, 1010, 1024), {None: "0-3"}),
    ],
)
def test_arm_kinds_come_from_capacity(capacities: tuple[int, ...], kinds: dict[str | None, str]) -> None:
    files = {f"{CPU}/cpu{cpu}/cpu_capacity": str(capacity) for cpu, capacity in enumerate(capacities)}
    assert groups(host_of(RootSpec(cpu=GRACE, files=files)), "kind") == kinds


def test_different_clock_rates_are_not_different_kinds() -> None:
    files = {f"{CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq": str(3_000_000 + cpu * 500_000) for cpu in range(4)}
    assert groups(host_of(RootSpec(files=files)), "kind") == {None: "0-3"}


def test_caches_of_all_levels() -> None:
    host = host_of(RootSpec(l3_per_numa=2, cores_per_l3=2, smt=2))
    sizes = {(cache.level, cache.type, format_cpulist(cache.cpus)): cache.bytes for cache in host.caches}
    assert sizes[1, "Data", "0,4"] == 48 << 10
    assert sizes[1, "Instruction", "3,7"] == 32 << 10
    assert sizes[2, "Unified", "1,5"] == 2 << 20
    assert {key: size for key, size in sizes.items() if key[0] == 3} == {
        (3, "Unified", "0-1,4-5"): 32 << 20,
        (3, "Unified", "2-3,6-7"): 32 << 20,
    }
    assert len(sizes) == 4 * 3 + 2


@pytest.mark.parametrize(("text", "size"), [("1M", 1 << 20), ("512", 512), ("2 MB", 2 << 20), ("0K", None), ("", None)])
def test_cache_sizes(text: str, size: int | None) -> None:
    files = {f"{CPU}/cpu0/cache/index3/size": text}
    assert [cache.bytes for cache in host_of(RootSpec(files=files), detail="launch").caches] == [size]


def test_an_empty_cache_mask_means_the_core(tmp_path: Path) -> None:
    files = {f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_map": "00000000" for cpu in range(4)}
    host = host_of(RootSpec(cores_per_l3=2, smt=2, hex_masks_only=True, files=files))
    assert groups(host, "l3") == {0: "0,2", 1: "1,3"}


@pytest.mark.parametrize("detail", ["launch", "full"])
def test_some_cores_may_have_no_l3(tmp_path: Path, detail: Literal["launch", "full"]) -> None:
    masks = {f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_map": "0000000e" for cpu in (1, 2, 3)}
    root = write_root(tmp_path, RootSpec(cores_per_l3=4, files=masks))
    shutil.rmtree(root / f"{CPU}/cpu0/cache/index3")
    assert [cpu.l3 for cpu in probe_host(Root(str(root)), detail=detail).cpus] == [None, 1, 1, 1]


def test_overlapping_numa_nodes_give_each_cpu_the_smallest() -> None:
    files = {
        "sys/devices/system/node/node1/cpulist": "0-3",
        "sys/devices/system/node/node0/cpulist": "2-3",
    }
    host = host_of(RootSpec(sockets=2, cores_per_l3=2, files=files))
    assert groups(host, "numa_node") == {1: "0-1", 0: "2-3"}


def test_numa_nodes_with_gaps_memory_and_distances() -> None:
    host = host_of(RootSpec(sockets=2, cores_per_l3=2, memory_only=1, node_ids=(0, 3, 12), node_memory_bytes=1 << 30))
    assert [(node.id, format_cpulist(node.cpus), node.memory_only) for node in host.numa_nodes] == [
        (0, "0-1", False),
        (3, "2-3", False),
        (12, "", True),
    ]
    assert host.numa_nodes[1].distances == ((0, 21), (3, 10), (12, 24))
    assert host.numa_nodes[0].memory_bytes == 1 << 30
    assert host.numa_nodes[0].free_bytes == 1 << 29


def test_a_node_cpumap_may_name_offline_cpus() -> None:
    files = {"sys/devices/system/node/node0/cpulist": "0-63"}
    assert host_of(RootSpec(offline="1", files=files)).numa_nodes[0].cpus == {0, 2, 3}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{CPU}/online", "0-"),
        (f"{CPU}/cpu0/topology/thread_siblings_list", "zero"),
        (f"{CPU}/cpu0/topology/core_siblings_list", "3-1"),
        (f"{CPU}/cpu0/cache/index3/shared_cpu_map", "xyz"),
        (f"{CPU}/cpu0/cache/index3/size", "big"),
        (f"{CPU}/cpu0/cache/index3/size", "²K"),
        (f"{CPU}/cpu0/cache/index3/size", "9" * 400),
        ("sys/devices/system/node/node0/cpulist", "1,,x"),
        ("sys/devices/system/node/node0/distance", "10 x"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: lots kB"),
        ("sys/devices/system/node/node0/meminfo", f"Node 0 MemTotal: {'9' * 5000} kB"),
    ],
)
@pytest.mark.parametrize("detail", ["launch", "full"])
def test_corrupt_files_are_named(tmp_path: Path, name: str, text: str, detail: str) -> None:
    root = write_root(tmp_path, RootSpec(files={name: text}))
    with pytest.raises(ProbeError) as caught:
        probe_host(Root(str(root)), detail=detail)  # type: ignore[arg-type]
    assert caught.value.source == str(root / name)


def test_names_with_other_digits_are_no_ids() -> None:
    host = host_of(RootSpec(files={f"{CPU}/cpu²/online": "1", "sys/devices/system/node/node²/cpulist": "0"}))
    assert [node.id for node in host.numa_nodes] == [0]
    assert host.offline_cpus == frozenset()


def test_ids_that_no_kernel_has_are_left_out() -> None:
    large = str(MAX_ID + 1)
    stat = f"cpu  1\ncpu0 1\ncpu{large} 1\ncpu99999999999 1"
    host = probe_host(MemoryRoot({"proc/stat": stat, f"sys/devices/system/node/node{large}/cpulist": "0"}))
    assert [cpu.id for cpu in host.cpus] == [0]
    assert host.numa_nodes == ()


class CountingRoot(Root):
    """A root that counts how often each file is read."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.read: list[str] = []

    def bytes(self, name: str, *, limit: int = 1 << 24) -> bytes | None:
        self.read.append(name)
        return super().bytes(name, limit=limit)


def test_of_caches_and_nodes_beyond_those_of_any_machine_nothing_is_read() -> None:
    """Each of a captured machine's may be a link to one folder: their number is squared, by that of CPUs or nodes."""
    files = {f"{CPU}/cpu0/cache/index{number}/level": f"{number}" for number in range(4, 4 + 2 * MAX_CACHES)}
    nodes = {f"sys/devices/system/node/node{number}/cpulist": "" for number in range(MAX_NODES + 9)}
    host = probe_host(MemoryRoot({f"{CPU}/online": "0", **files, **nodes}), detail="full")
    assert len(host.caches) == MAX_CACHES
    assert host.numa_nodes[-1].id == MAX_NODES - 1


def test_a_launch_reads_each_group_once(tmp_path: Path) -> None:
    spec = RootSpec(sockets=2, numa_per_socket=2, l3_per_numa=2, cores_per_l3=4, smt=2, cpu=EPYC)
    root = CountingRoot(str(write_root(tmp_path, spec)))
    probe_host(root, detail="launch")
    of_siblings = [name for name in root.read if "thread_siblings" in name]
    assert len(of_siblings) == 32
    assert len([name for name in root.read if "core_siblings" in name]) <= 3
    assert {name.split("/")[6] for name in root.read if "/cache/" in name} == {"index3"}
    assert len([name for name in root.read if "index3/shared" in name]) == 8
    assert len([name for name in root.read if name == "proc/cpuinfo"]) <= 2
    assert not any("pci" in name for name in root.read)
    assert len(root.read) - len(of_siblings) < 100


def test_a_virtual_machine_whose_cpus_are_sockets_has_each_package_id_read_once(tmp_path: Path) -> None:
    root = CountingRoot(str(write_root(tmp_path, RootSpec(sockets=16, cores_per_l3=1))))
    assert len(groups(probe_host(root, detail="launch"), "socket")) == 16
    assert len([name for name in root.read if name.endswith("physical_package_id")]) == 16
