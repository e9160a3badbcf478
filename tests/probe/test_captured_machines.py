"""The probe reads every captured machine without an error and without a wrong fact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.view.host_view import probe_json
from tests import json_output
from tests.probe.captured import SHARED, disagreements, hwloc_machines, util_linux_machines
from tests.probe.corpus_answers import answers

Machine = dict[str, Any]
RootOf = Callable[[Machine], Path]


def by_id(machines: list[Machine]) -> Any:
    cases = [
        pytest.param(machine, id=machine["id"], marks=pytest.mark.xdist_group(machine["id"])) for machine in machines
    ]
    return pytest.mark.parametrize("machine", cases)


@by_id(hwloc_machines())
def test_hwloc_machine(machine: Machine, captured_root: RootOf) -> None:
    host = probe_host(Root(str(captured_root(machine))))
    assert disagreements(machine["expected"], answers(host)) == ([], [])


@pytest.mark.skipif(not util_linux_machines(), reason=f"the GPL half of the corpus is not at {SHARED.name}")
@by_id(util_linux_machines())
def test_util_linux_machine(machine: Machine, captured_root: RootOf) -> None:
    host = probe_host(Root(str(captured_root(machine))))
    json_output.checked("probe", probe_json(host))
    assert disagreements(machine["expected"], answers(host)) == ([], [])


@by_id(hwloc_machines())
def test_launch_detail_finds_the_same_cpus(machine: Machine, captured_root: RootOf) -> None:
    root = Root(str(captured_root(machine)))
    launch, full = probe_host(root, detail="launch"), probe_host(root)
    assert launch.cpus == full.cpus
    assert launch.limits == full.limits
    assert launch.numa_nodes == full.numa_nodes
    assert set(launch.caches) == {cache for cache in full.caches if cache.level == 3}


@by_id(hwloc_machines())
def test_ids_are_unique_and_groups_consistent(machine: Machine, captured_root: RootOf) -> None:
    host = probe_host(Root(str(captured_root(machine))))
    for group in ("core", "socket", "l3"):
        ids = {getattr(cpu, group) for cpu in host.cpus} - {None}
        assert all(min(cpu.id for cpu in host.cpus if getattr(cpu, group) == id_) >= id_ for id_ in ids)
    assert host.limits.budget.cpus <= {cpu.id for cpu in host.cpus}
    assert host.limits.budget.threads >= 1


def test_a_cpuset_of_the_capture_is_honoured(captured_root: RootOf) -> None:
    machine = next(machine for machine in hwloc_machines() if machine["id"] == "16amd64-8n2c-cpusets")
    limits = probe_host(Root(str(captured_root(machine)))).limits
    assert limits.budget.cpus == {0, 1, 2, 3, 5, 6, 12, 13, 14, 15}
    assert limits.memory_nodes == {1, 2, 3, 4}
    assert limits.budget.limited_by == "cpuset 0-6,12-15 (dev/cpuset/dummy/cpus)"
