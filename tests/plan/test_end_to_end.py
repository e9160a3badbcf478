"""From files to plans: captured machines and synthetic roots, probed and planned for."""

from pathlib import Path
from typing import Any

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.view.plan_view import plan_json, plan_text
from tests import json_output
from tests.plan.machines import lines, plan
from tests.probe.captured import hwloc_machines, unpack
from tests.roots import EPYC, GRACE, RootSpec, host_of

FLAGS = ("", "--instances auto", "--instances 2", "--cores-per-instance 3", "--smt --instances 3", "--e-cores")


@pytest.mark.parametrize("machine", hwloc_machines(), ids=lambda machine: machine["id"])
def test_every_captured_machine_is_planned_for(machine: dict[str, Any], tmp_path: Path) -> None:
    host = probe_host(Root(str(unpack(machine, tmp_path))), detail="launch")
    cores = len({cpu.core for cpu in host.cpus if cpu.id in host.limits.budget.cpus})
    for flags in FLAGS:
        made = plan_if_it_fits(host, flags)
        if made is None:
            assert cores < 3
            continue
        assert plan_text(made, host, width=80, color=False)
        assert json_output.checked("plan", plan_json(made))["world_size"] == len(made.workers)
        check_workers(made, host)


def plan_if_it_fits(host: Host, flags: str) -> LaunchPlan | None:
    try:
        return plan(host, flags)
    except UsageError:
        return None


def check_workers(made: LaunchPlan, host: Host) -> None:
    without_cpus = {node.id for node in host.numa_nodes if not node.cpus}
    taken: set[int] = set()
    for worker in made.workers:
        assert worker.cpus
        assert worker.cpus <= host.limits.budget.cpus
        assert not worker.cpus & taken
        assert not worker.numa_nodes & without_cpus
        assert worker.threads == len(worker.cpus)
        taken |= worker.cpus


TWO = RootSpec(sockets=2, cores_per_l3=4, smt=2)


@pytest.mark.parametrize(
    ("spec", "flags", "expected"),
    [
        (TWO, "--instances 2", ["0: 0-3 preferred:0 t4", "1: 4-7 preferred:1 t4"]),
        (
            RootSpec(sockets=2, cores_per_l3=2, smt=2, numbering="adjacent", cpu=EPYC),
            "--instances 2",
            ["0: 0,2 preferred:0 t2", "1: 4,6 preferred:1 t2"],
        ),
        (
            RootSpec(sockets=2, cores_per_l3=2, numbering="interleaved"),
            "--instances 2",
            ["0: 0,2 preferred:0 t2", "1: 1,3 preferred:1 t2"],
        ),
        (
            RootSpec(sockets=2, cores_per_l3=2, memory_only=2, cpu=GRACE),
            "",
            ["0: 0-3 interleave:0-1 t4"],
        ),
        (
            RootSpec(sockets=2, numa_per_socket=6, cores_per_l3=2, node_ids=tuple(range(10, 22))),
            "--numa-nodes 14,21 --instances auto",
            ["0: 8-9 preferred:14 t2", "1: 22-23 preferred:21 t2"],
        ),
        (RootSpec(cores_per_l3=2, efficiency_cores=4), "", ["0: 0-1 none:0 t2"]),
        (
            RootSpec(cores_per_l3=4, cgroup="v2", quota_cpus=1.5),
            "--instances 2",
            ["0: 0-3 none:0 t1", "1: 0-3 none:0 t1"],
        ),
        (RootSpec(cores_per_l3=4, cgroup="v1", cpuset="2-3"), "", ["0: 2-3 none:0 t2"]),
        (RootSpec(cores_per_l3=4, affinity="1"), "", ["0: 1 none:0 t1"]),
        (
            RootSpec(sockets=2, cores_per_l3=2, node_directory=False),
            "--instances 2",
            ["0: 0-1 none: t2", "1: 2-3 none: t2"],
        ),
    ],
)
def test_synthetic_roots(spec: RootSpec, flags: str, expected: list[str]) -> None:
    assert lines(plan(host_of(spec, detail="launch"), flags)) == expected
