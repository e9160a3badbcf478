"""Captured machines: their location, unpacking, and expected facts."""

import json
import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import IO, Any, cast

from cpulaunch.records.cpulist import parse_cpulist

HWLOC = Path(__file__).parent.parent / "data" / "hwloc"
SHARED = Path(__file__).parent.parent.parent.parent / "shared" / "corpus"
"""The util-linux half is GPL and not part of this project; it is read from a folder beside the checkout."""

UNASSERTED = {"restricted", "cpu_types", "n_numa_nodes_without_gpu_memory"}
CACHE_COUNTS = {"n_L2": "L2", "n_L3": "L3"}
IDS = {"online_cpus", "offline_cpus"}
GROUPS = {"sockets", "cores", "dies", "cpu_kinds"}
NODE_LISTS = {"cpuless_nodes", "memory_only_nodes"}


def hwloc_machines() -> list[dict[str, Any]]:
    return [
        machine | {"path": HWLOC / machine["archive"]} for machine in json.loads((HWLOC / "corpus.json").read_text())
    ]


def util_linux_machines() -> list[dict[str, Any]]:
    if not (SHARED / "corpus.json").exists():
        return []
    found = json.loads((SHARED / "corpus.json").read_text())
    return [
        {
            "id": machine["id"],
            "path": SHARED / machine["archive"],
            "root": machine["root_in_archive"],
            "expected": {name: fact for name, fact in machine["expected"].items() if name not in UNASSERTED},
        }
        for machine in found
        if "util-linux" in machine["archive"]
    ]


READ = re.compile(
    r"[^/]+(/fsroot)?/(proc/|dev/cpuset/|sys/fs/cgroup/[^/]*$|sys/fs/cgroup/cpuset/|sys/kernel/mm/transparent_hugepage/"
    r"|sys/devices/system/cpu/([^/]+$|cpu\d+/(online$|cpu_capacity$|topology/((die|book|drawer)_id|phys|[a-z]+_(cpus|siblings))|cache/index\d/(level|type|size|shared)|cpufreq(/scaling_governor)?$)|cpufreq/policy\d+/base_frequency$)"
    r"|sys/devices/system/node/([^/]+$|node\d+/(cpumap|cpulist|meminfo|distance|access\d/initiators/node\d+)$))"
)
"""The files that a probe reads. Unpacking the rest (every PCI device, idle state, memory block) takes minutes."""


def unpack(machine: dict[str, Any], target: Path) -> Path:
    """The machine's root directory, unpacked under `target`."""
    made: set[Path] = set()
    with tarfile.open(machine["path"]) as archive:
        for member in archive:
            file = target / member.name
            if not READ.match(member.name.removeprefix("./")) or not (member.isreg() or member.issym()):
                continue
            if file.parent not in made:
                file.parent.mkdir(parents=True, exist_ok=True)
                made.add(file.parent)
            if member.issym():
                file.symlink_to(member.linkname)
            else:
                file.write_bytes(cast(IO[bytes], archive.extractfile(member)).read())
    return target / machine["root"]


def disagreements(expected: dict[str, Any], answered: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The expected facts that are wrong, and those that are unknown."""
    wrong, missing = [], []
    for name, fact in expected.items():
        verdict = _agrees(name, fact, answered)
        if verdict is None:
            missing.append(name)
        elif not verdict:
            wrong.append(f"{name}: expected {str(fact)[:200]}")
    return wrong, missing


def _agrees(name: str, fact: Any, answered: dict[str, Any]) -> bool | None:
    if name in CACHE_COUNTS:
        return answered[CACHE_COUNTS[name]]["count"] == fact if CACHE_COUNTS[name] in answered else None
    if name.endswith("_one_of"):
        answer = answered[name.removesuffix("_one_of")]
        return (
            (answer["min"] == answer["max"] and answer["max"] in fact) if isinstance(answer, dict) else answer in fact
        )
    answer = answered.get(name.removesuffix("_subset"))
    return None if answer is None else _same(name.removesuffix("_subset"), fact, answer)


def _same(name: str, fact: Any, answer: Any) -> bool:
    if name in IDS:
        return parse_cpulist(fact) == parse_cpulist(answer)
    if name in GROUPS:
        return Counter(map(parse_cpulist, fact)) == Counter(map(parse_cpulist, answer))
    if name in NODE_LISTS:
        return sorted(fact) == sorted(answer)
    if name == "numa_nodes":
        return all(node in answer and parse_cpulist(cpus) == parse_cpulist(answer[node]) for node, cpus in fact.items())
    if name == "memory_locality":
        return {node: parse_cpulist(cpus) for node, cpus in fact.items()} == {
            node: parse_cpulist(cpus) for node, cpus in answer.items()
        }
    if name == "numa_memory":
        return all(node in answer and _near(known, answer[node]) for node, known in fact.items())
    if name == "numa_distance":
        return all(answer.get(node, {}).get(other) == to for node, row in fact.items() for other, to in row.items())
    if name == "machine_memory":
        return _near(fact, answer)
    if name == "model_name":
        return bool(fact.split() == answer.split())
    return _same_caches(fact, answer) if name.startswith("L") else bool(fact == answer)


def _near(known: dict[str, int], value: int) -> bool:
    return abs(value - known["bytes"]) <= known.get("tolerance", 0)


def _same_caches(fact: dict[str, Any], answer: dict[str, Any]) -> bool:
    found = {parse_cpulist(cache["cpus"]): cache["bytes"] for cache in answer["instances"]}
    return fact["count"] == answer["count"] and all(
        parse_cpulist(cache["cpus"]) in found
        and ("bytes" not in cache or _near(cache, found[parse_cpulist(cache["cpus"])] or cache["bytes"]))
        for cache in fact["instances"]
    )
