"""The output of `cpulaunch probe`: JSON, table, map and picture."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.records.host import FEATURES, Gpu, Host, Library, Quota, Torch
from cpulaunch.view.host_view import probe_json, probe_text
from cpulaunch.view.machine_map import machine_map
from cpulaunch.view.machine_svg import machine_svg
from tests import json_output
from tests.probe.captured import hwloc_machines
from tests.roots import EPYC, GRACE, RootSpec, X86Cpu, host_of

SHAPES = {
    "one": RootSpec(cores_per_l3=1),
    "two-sockets": RootSpec(sockets=2, numa_per_socket=2, l3_per_numa=2, cores_per_l3=4, smt=2, memory_only=1),
    "hybrid": RootSpec(cores_per_l3=8, smt=2, efficiency_cores=16, affinity="0-20", offline="3"),
    "no-nodes": RootSpec(node_directory=False, cpu=GRACE),
    "large": RootSpec(sockets=2, numa_per_socket=4, l3_per_numa=2, cores_per_l3=16, smt=2, cpu=EPYC),
    "adjacent": RootSpec(sockets=2, cores_per_l3=24, smt=2, numbering="adjacent", cgroup="v2", quota_cpus=2.0),
}
HOSTS = {name: host_of(spec) for name, spec in SHAPES.items()}

TWO_SOCKETS = """\
╭─ socket 0 ──────────────────────────────────────────────╮
│ NUMA node 0 · 64 GiB · CPUs 0-7,32-39                   │
│ ┌─ L3 32 MiB ─────────────┐ ┌─ L3 32 MiB ─────────────┐ │
│ │  0,32  1,33  2,34  3,35 │ │  4,36  5,37  6,38  7,39 │ │
│ │    w0    w0    w0    w0 │ │    w0    w0    w1     · │ │
│ └─────────────────────────┘ └─────────────────────────┘ │
│ NUMA node 1 · 64 GiB · CPUs 8-15,40-47                  │
│ ┌─ L3 32 MiB ─────────────┐ ┌─ L3 32 MiB ─────────────┐ │
│ │  8,40  9,41 10,42 11,43 │ │ 12,44 13,45 14,46 15,47 │ │
│ │     ·     ·     ·     · │ │     ·     ·     ·     · │ │
│ └─────────────────────────┘ └─────────────────────────┘ │
╰─────────────────────────────────────────────────────────╯
"""

HYBRID = """\
╭─ socket 0 ──────────────────────────────────────────────────────────╮
│ NUMA node 0 · 64 GiB · CPUs 0-2,4-31                                │
│ ┌─ L3 32 MiB ───────────────────┐ ┌─ L3 32 MiB ───────────────────┐ │
│ │  0,8  1,9 2,10 4,12 5,13 6,14 │ │  16e  17e  18e  19e  20e 21ex │ │
│ │ 7,15   11                     │ │ 22ex 23ex 24ex 25ex 26ex 27ex │ │
│ └───────────────────────────────┘ │ 28ex 29ex 30ex 31ex           │ │
│                                   └───────────────────────────────┘ │
╰─────────────────────────────────────────────────────────────────────╯
a,b: SMT siblings of one core
e: efficiency core
x: not available to this process
offline CPUs (not drawn): 3"""


def test_the_map_of_two_sockets_with_workers() -> None:
    owners = dict.fromkeys(range(6), 0) | {6: 1}
    drawn = machine_map(HOSTS["two-sockets"], owners=owners)
    assert drawn.startswith(TWO_SOCKETS)
    assert drawn.endswith(
        "NUMA node 4 · 64 GiB · memory only\na,b: SMT siblings of one core\nwN: worker N    ·: no worker"
    )


def test_the_map_of_a_hybrid_machine() -> None:
    assert machine_map(HOSTS["hybrid"]) == HYBRID


def test_large_machines_name_cores_by_their_first_cpu() -> None:
    drawn = machine_map(HOSTS["large"])
    assert "n: first CPU of a core; its SMT sibling is n+256" in drawn
    assert re.search(r"│ +0 +1 +2 +3 ", drawn)
    assert "n+1" in machine_map(HOSTS["adjacent"])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_maps_and_tables_fit(name: str, width: int) -> None:
    host = HOSTS[name]
    for text in (machine_map(host, width=width), machine_map(host, width=width, owners={0: 12})):
        assert max(map(len, text.splitlines())) <= width
    lines = probe_text(host, width=width, color=False).splitlines()
    assert max(map(len, lines)) <= max(width, 80)


@pytest.mark.parametrize("name", SHAPES)
def test_colours_do_not_change_the_text(name: str) -> None:
    host, owners = HOSTS[name], {0: 0, 1: 1}
    coloured = machine_map(host, color=True, owners=owners)
    assert re.sub(r"\033\[\d+m", "", coloured) == machine_map(host, owners=owners)
    assert "\033[36m" in coloured
    assert "\033" not in probe_text(host, width=80, color=False)


def test_every_core_is_on_the_map_once() -> None:
    drawn = machine_map(HOSTS["large"])
    numbers = [int(word) for line in drawn.splitlines() if re.match(r"│ │", line) for word in re.findall(r"\d+", line)]
    assert sorted(numbers) == sorted({cpu.core for cpu in HOSTS["large"].cpus})


def test_the_table_names_the_limits() -> None:
    text = probe_text(HOSTS["adjacent"], width=80, color=False)
    assert "budget     2 threads on CPUs 0-95: cgroup CPU quota 2.0" in text
    assert "cores      2 sockets · 2 NUMA nodes · 48 cores · 96 logical CPUs" in text
    assert "caches     L1d 48 × 48 KiB" in text
    assert "distances  0:  10  21\n           1:  21  10\n" in text
    assert "libraries  none" in text


def test_the_table_lists_the_extensions_of_torch() -> None:
    torch = Torch(version="2.8.0", path="/env/torch", plugin=True, extensions=("intel_extension_for_pytorch",))
    text = probe_text(replace(HOSTS["one"], torch=torch), width=80, color=False)
    assert re.search(r"torch +2\.8\.0 +/env/torch", text)
    assert re.search(r"plugin +cpulaunch \(loaded by torch\)", text)
    assert re.search(r"extension +intel_extension_for_pytorch", text)
    without = probe_text(replace(HOSTS["one"], torch=Torch(version="2.4.1", path="/t")), width=80, color=False)
    assert re.search(r"plugin +none", without)


def test_the_json_contract() -> None:
    found = json_output.read("probe", json.dumps(probe_json(HOSTS["hybrid"])))
    assert found["schema"] == 1
    assert found["arch"] == "x86_64"
    assert set(found["cpu"]["features"]) == set(FEATURES)
    assert found["cpu"]["features"]["avx512f"] is True
    assert found["cpus"][0] == {
        "id": 0,
        "core": 0,
        "socket": 0,
        "die": None,
        "l3": 0,
        "numa_node": 0,
        "kind": "performance",
    }
    assert found["offline_cpus"] == "3"
    assert found["numa_nodes"][0]["distances"] == {"0": 10}
    assert found["numa_nodes"][0]["memory_only"] is False
    assert {"level": 3, "type": "Unified", "cpus": "0-2,4-15", "bytes": 32 << 20} in found["caches"]
    assert found["limits"]["affinity"] == "0-2,4-20"
    assert found["limits"]["cpuset"] is None
    assert found["limits"]["quota_cpus"] is None
    assert found["limits"]["budget"] == {
        "cpus": "0-2,4-20",
        "threads": 20,
        "limited_by": "CPU affinity 0-2,4-20",
    }
    assert found["kernel"]["transparent_hugepage"] == "madvise"
    assert (found["libraries"], found["gpus"]) == ([], [])


def test_this_machine_as_json() -> None:
    assert json_output.read("probe", json.dumps(probe_json(probe_host(Root()))))["sysroot"] is None


@pytest.mark.parametrize("name", SHAPES)
def test_the_picture_is_valid_and_complete(name: str) -> None:
    host = HOSTS[name]
    document = minidom.parseString(machine_svg(host, {0: 0, 1: 3}))
    texts = [node.firstChild.data for node in document.getElementsByTagName("text") if node.firstChild]  # type: ignore[union-attr]
    assert {str(cpu.id) for cpu in host.cpus} <= set(texts)
    assert any(text.startswith("w0") for text in texts)


def test_the_picture_escapes_names() -> None:
    host = host_of(RootSpec(cpu=X86Cpu(model_name='<script>"&</script>')))
    picture = machine_svg(host)
    minidom.parseString(picture)
    assert "<script>" not in picture


@pytest.mark.parametrize(
    "machine",
    [pytest.param(one, id=one["id"], marks=pytest.mark.xdist_group(one["id"])) for one in hwloc_machines()],
)
def test_captured_machines_can_be_shown(machine: dict[str, Any], captured_root: Callable[..., Path]) -> None:
    host = probe_host(Root(str(captured_root(machine))))
    assert max(map(len, machine_map(host).splitlines())) <= 80
    assert probe_text(host, width=80, color=True)
    minidom.parseString(machine_svg(host))
    json_output.read("probe", json.dumps(probe_json(host)))


EVIL = "Xeon\x1b]0;owned\x07\x9b31m\u202e<b>\x00\ud8ff&"


def evil_host() -> Host:
    """A machine whose every text is hostile, as that of a captured machine may be."""
    host = host_of(RootSpec(sockets=2, cgroup="v2", quota_cpus=2.0))
    library = Library(kind="allocator", name=EVIL, path=f"/{EVIL}.so", untrusted=EVIL)
    quota = Quota(cpus=2.0, source=EVIL)
    return replace(
        host,
        arch=EVIL,
        cpu=replace(host.cpu, vendor=EVIL, model_name=EVIL, platform=EVIL),
        kernel=replace(host.kernel, release=EVIL, governor=EVIL, smt=EVIL, transparent_hugepage=EVIL),
        limits=replace(host.limits, quota=quota, budget=replace(host.limits.budget, limited_by=EVIL)),
        libraries=(library,),
        gpus=(Gpu(index=0, vendor=EVIL, pci=EVIL, model=EVIL),),
        torch=Torch(version=EVIL, path=f"/{EVIL}", bundled_openmp=EVIL, extensions=(EVIL,)),
        sysroot=EVIL,
    )


@pytest.mark.parametrize("color", [False, True])
def test_escape_sequences_of_a_captured_machine_are_shown_as_text(color: bool) -> None:
    text = probe_text(evil_host(), width=80, color=color)
    assert r"\x1b]0;owned\x07\x9b31m\u202e<b>" in text
    assert re.sub(r"\033\[\d+m" if color else r"\n", "", text).replace("\n", "").isprintable()


def test_the_picture_of_a_hostile_machine_is_well_formed() -> None:
    picture = machine_svg(evil_host()).encode()
    title = minidom.parseString(picture).getElementsByTagName("title")[0].firstChild
    assert title is not None
    assert r"Xeon\x1b]0;owned\x07" in title.nodeValue
