"""Kernel files that contradict one another: the probe reads them all, by the rules of docs/architecture.md."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpulaunch.probe import probe_host
from cpulaunch.probe.contradictions import read_contradictions
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import Host
from tests.plan.machines import plan
from tests.roots import MemoryRoot, RootSpec, cpumask, root_files

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
BITS = 16
Files = dict[str, str]

some_cpus = st.frozensets(st.integers(0, BITS - 1), max_size=BITS)
shapes = st.builds(
    RootSpec,
    sockets=st.integers(1, 2),
    numa_per_socket=st.integers(1, 2),
    cores_per_l3=st.integers(2, 3),
    smt=st.integers(1, 2),
    numbering=st.sampled_from(["linux", "adjacent", "interleaved"]),
    offline=st.sampled_from(["", "0", "1"]),
)
GROUP_FILES = (
    *(f"topology/{name}" for name in ("core_siblings", "package_cpus", "thread_siblings", "core_cpus", "die_cpus")),
    *(f"cache/index{index}/shared_cpu" for index in (0, 3)),
)


@st.composite
def contradictions(draw: Callable[..., object], files: Files) -> Files:
    """Some files of CPUs and NUMA nodes with other ids, and some that are gone."""
    cpus = sorted({int(name.split("/")[4][3:]) for name in files if "/topology/" in name})
    changed: Files = {}
    for _ in range(draw(st.integers(1, 12))):  # type: ignore[call-overload]
        base = f"{CPU}/cpu{draw(st.sampled_from(cpus))}"
        stem = str(draw(st.sampled_from(GROUP_FILES)))
        ids: frozenset[int] = draw(some_cpus)  # type: ignore[assignment]
        mask = stem + "_map" * stem.startswith("cache")
        forms = {f"{base}/{stem}_list": format_cpulist(ids), f"{base}/{mask}": cpumask(ids, BITS)}
        changed |= draw(st.sampled_from([forms, dict([forms.popitem()]), forms]))  # type: ignore[arg-type]
    for cpu in cpus:
        for name in ("physical_package_id", "die_id"):
            number = draw(st.sampled_from([None, None, -1, 0, 1]))
            changed |= {} if number is None else {f"{CPU}/cpu{cpu}/topology/{name}": str(number)}
    if draw(st.booleans()):
        changed[f"{NODE}/node0/cpulist"] = format_cpulist(draw(some_cpus))  # type: ignore[arg-type]
    gone = draw(st.sets(st.sampled_from(sorted(name for name in files if "/topology/" in name)), max_size=8))
    return {name: text for name, text in (files | changed).items() if name not in gone}  # type: ignore[operator]


def check_consistent(host: Host, online: frozenset[int]) -> None:
    """Every online CPU once; ids name their lowest CPU; a core in one die and one L3, a die in one socket."""
    assert [cpu.id for cpu in host.cpus] == sorted(online)
    for inner, outer in (("core", "die"), ("core", "l3"), ("core", "socket"), ("die", "socket")):
        pairs = {(getattr(cpu, inner), getattr(cpu, outer)) for cpu in host.cpus if getattr(cpu, inner) is not None}
        assert len(pairs) == len({group for group, _ in pairs}), (inner, outer)
    for name in ("core", "die", "l3", "socket"):
        assert all(getattr(cpu, name) is None or getattr(cpu, name) <= cpu.id for cpu in host.cpus)
    shared = {frozenset(cpu.id for cpu in host.cpus if cpu.l3 == l3) for l3 in {cpu.l3 for cpu in host.cpus} - {None}}
    assert shared == {cache.cpus for cache in host.caches if cache.level == 3}
    assert all(node.cpus <= online for node in host.numa_nodes)


def check_sockets(host: Host, files: Files) -> None:
    """Never more sockets than package ids."""
    packages = {files.get(f"{CPU}/cpu{cpu.id}/topology/physical_package_id", "-1") for cpu in host.cpus}
    if "-1" not in packages:
        assert len({cpu.socket for cpu in host.cpus}) <= len(packages)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), spec=shapes)
def test_any_contradiction_gives_one_consistent_machine(data: st.DataObject, spec: RootSpec) -> None:
    files = data.draw(contradictions(root_files(spec)))
    root = MemoryRoot(files)
    host = probe_host(root)
    check_consistent(host, root.cpulist(f"{CPU}/online") or frozenset())
    check_sockets(host, files)
    assert probe_host(root, detail="launch").cpus == host.cpus
    assert all(clause.isprintable() for clause in read_contradictions(root, host))
    assert plan(host).workers


@settings(max_examples=25, deadline=None)
@given(spec=shapes)
def test_cluster_on_die_splits_no_socket(spec: RootSpec) -> None:
    files = root_files(spec)
    true = probe_host(MemoryRoot(files))
    for node in true.numa_nodes:
        files |= {f"{CPU}/cpu{cpu}/topology/core_siblings_list": format_cpulist(node.cpus) for cpu in node.cpus}
    root = MemoryRoot(files)
    assert probe_host(root).cpus == true.cpus
    clauses = [clause for clause in read_contradictions(root, true) if clause.endswith("the ids make the sockets")]
    assert bool(clauses) == (len({cpu.socket for cpu in true.cpus}) < sum(bool(node.cpus) for node in true.numa_nodes))


def siblings(lists: dict[int, str], name: str = "core_siblings_list") -> Files:
    return {f"{CPU}/cpu{cpu}/topology/{name}": text for cpu, text in lists.items()}


MORE_MEMORY = {"proc/meminfo": f"MemTotal: {168 << 20} kB\nMemFree: {100 << 20} kB"}
"""As on a virtual machine whose hypervisor has added memory since the boot."""


def test_a_single_numa_node_has_the_memory_of_the_machine() -> None:
    (node,) = probe_host(MemoryRoot(root_files(RootSpec()) | MORE_MEMORY)).numa_nodes
    assert (node.memory_bytes, node.free_bytes) == (168 << 30, 100 << 30)


@pytest.mark.parametrize(
    ("files", "clause"),
    [
        (
            siblings({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}),
            "2 sibling lists for 1 package id: the ids make the sockets",
        ),
        (siblings({2: "-1"}, "physical_package_id"), "CPU 2 without a package id: sibling lists make the sockets"),
        (
            siblings({1: "00000003"}, "thread_siblings"),
            "thread_siblings and thread_siblings_list differ for CPU 1: the list counts",
        ),
        (
            siblings({1: "1-2"}, "core_cpus_list"),
            "thread_siblings and core_cpus differ for CPU 1: thread_siblings counts",
        ),
        (siblings({3: "1-3"}), "core_siblings of CPUs 0-3 contradict one another: that of the lowest CPU counts"),
        (
            {f"{CPU}/cpu0/cache/index3/shared_cpu_list": "0"},
            "shared_cpu_map and shared_cpu_list of index3 differ for CPU 0: the map counts",
        ),
        ({f"{NODE}/node0/cpulist": "0-5"}, "NUMA node 0 names CPUs 4-5, not online: left out"),
        ({f"{NODE}/node1/cpulist": "2-3"}, "CPUs 2-3 in several NUMA nodes: the smallest counts"),
        (MORE_MEMORY, "104 GiB of the machine's 168 GiB in none of 1 NUMA node: it has all"),
    ],
)
def test_each_contradiction_is_named_with_the_file_that_counts(files: Files, clause: str) -> None:
    root = MemoryRoot(root_files(RootSpec(cores_per_l3=4)) | files)
    assert clause in read_contradictions(root, probe_host(root))


def test_files_that_agree_contradict_nothing() -> None:
    root = MemoryRoot(
        root_files(RootSpec(sockets=2, numa_per_socket=2, cores_per_l3=2, smt=2, offline="3", memory_only=1))
    )
    assert read_contradictions(root, probe_host(root)) == ()
