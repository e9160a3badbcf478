"""What holds for every plan, on machines of any shape."""

from itertools import combinations
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host, LogicalCpu
from cpulaunch.records.plan import LaunchPlan, WorkerPlan
from tests.plan.machines import GIB, cpuset, hybrid, machine, memory, plan, quota

SHAPES = st.builds(
    machine,
    sockets=st.integers(1, 3),
    nodes=st.integers(1, 3),
    l3s=st.integers(1, 3),
    cores=st.integers(1, 5),
    smt=st.integers(1, 2),
    numbering=st.sampled_from(("linux", "adjacent", "interleaved")),
    numa=st.booleans(),
)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    """A machine, perhaps with a cpuset, efficiency cores, a memory-only NUMA node."""
    host = draw(SHAPES)
    ids = sorted(cpu.id for cpu in host.cpus)
    if draw(st.booleans()):
        host = cpuset(host, format_cpulist(draw(st.sets(st.sampled_from(ids), min_size=1))))
    if draw(st.booleans()):
        host = hybrid(host, format_cpulist(draw(st.sets(st.sampled_from(ids), max_size=len(ids) // 2))))
    if host.numa_nodes and draw(st.booleans()):
        host = memory(host, 20, 16 * GIB)
    return host


def core_of(host: Host) -> dict[int, LogicalCpu]:
    return {cpu.id: cpu for cpu in host.cpus}


def cores(host: Host, worker: WorkerPlan) -> int:
    by_id = core_of(host)
    return len({by_id[id_].core for id_ in worker.cpus})


def pool_cores(host: Host) -> int:
    return cores(host, plan(host).workers[0])


def divided(host: Host, data: st.DataObject, more: str = "") -> LaunchPlan:
    count = data.draw(st.integers(1, pool_cores(host)), label="instances")
    return plan(host, f"--instances {count} {more}")


@given(hosts(), st.data())
@settings(max_examples=150, deadline=None)
def test_workers_are_disjoint_and_inside_the_budget(host: Host, data: st.DataObject) -> None:
    made = divided(host, data)
    for one, other in combinations(made.workers, 2):
        assert not one.cpus & other.cpus
    for worker in made.workers:
        assert worker.cpus
        assert worker.cpus <= host.limits.budget.cpus


@given(hosts(), st.data())
@settings(max_examples=150, deadline=None)
def test_instances_of_a_division_differ_by_at_most_one_core(host: Host, data: st.DataObject) -> None:
    sizes = [cores(host, worker) for worker in divided(host, data).workers]
    assert max(sizes) - min(sizes) <= 1


@given(hosts(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_division_idles_at_most_a_quarter_of_the_pool(host: Host, data: st.DataObject) -> None:
    made = divided(host, data)
    used = sum(cores(host, worker) for worker in made.workers)
    assert (pool_cores(host) - used) * 4 <= pool_cores(host)


@given(hosts(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_size_is_kept_exactly(host: Host, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, pool_cores(host)), label="size")
    made = plan(host, f"--cores-per-instance {size}")
    assert made.workers
    assert {cores(host, worker) for worker in made.workers} == {size}


CROSSED = (("L3 caches", "l3"), ("NUMA nodes", "numa_node"), ("sockets", "socket"))


@given(hosts(), st.data())
@settings(max_examples=300, deadline=None)
def test_an_instance_crosses_a_region_that_it_fits_inside_only_with_a_warning(host: Host, data: st.DataObject) -> None:
    made = divided(host, data)
    by_id = core_of(host)
    pool = {by_id[id_].core for id_ in plan(host).workers[0].cpus}
    warned = [number for number, (word, _) in enumerate(CROSSED) if any(word in text for text in made.warnings)]
    for number, (_, attribute) in enumerate(CROSSED):
        if warned and number <= warned[-1]:
            continue
        for worker in made.workers:
            touched = {_group(by_id[id_], attribute) for id_ in worker.cpus}
            held = [sum(_group(by_id[core], attribute) == group for core in pool) for group in touched]
            assert len(touched) == 1 or max(held) < cores(host, worker)


def _group(cpu: LogicalCpu, attribute: str) -> object:
    """L3s count inside a NUMA node, NUMA nodes inside a socket."""
    parts = {"l3": (cpu.socket, cpu.numa_node, cpu.l3), "numa_node": (cpu.socket, cpu.numa_node)}
    return parts.get(attribute, cpu.socket)


@given(hosts(), st.data())
@settings(max_examples=100, deadline=None)
def test_memory_only_nodes_get_no_memory(host: Host, data: st.DataObject) -> None:
    made = divided(host, data, data.draw(st.sampled_from(("", "--membind bind", "--membind interleave"))))
    without_cpus = {node.id for node in host.numa_nodes if not node.cpus}
    for worker in made.workers:
        assert not worker.numa_nodes & without_cpus
        assert worker.mempolicy == "none" or worker.numa_nodes


@given(hosts(), st.floats(0.1, 40.0), st.data())
@settings(max_examples=150, deadline=None)
def test_threads_stay_within_the_quota_unless_instances_exceed_it(host: Host, cpus: float, data: st.DataObject) -> None:
    made = divided(quota(host, cpus), data)
    assert sum(worker.threads for worker in made.workers) <= max(ceil(cpus), len(made.workers))
    assert all(worker.threads >= 1 for worker in made.workers)


@given(hosts(), st.data())
@settings(max_examples=100, deadline=None)
def test_the_same_request_gives_the_same_plan(host: Host, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, pool_cores(host)), label="instances")
    assert plan(host, f"--instances {count}") == plan(host, f"--instances {count}")


@given(hosts(), st.data())
@settings(max_examples=100, deadline=None)
def test_the_index_of_an_instance_selects_without_moving_it(host: Host, data: st.DataObject) -> None:
    whole = divided(host, data)
    index = data.draw(st.integers(0, whole.world_size - 1), label="index")
    part = plan(host, f"--instances {whole.world_size} --instance-index {index}")
    assert part.world_size == whole.world_size
    assert part.workers[0].cpus == whole.workers[index].cpus


@given(hosts(), st.integers(1, 80), st.integers(1, 80))
@settings(max_examples=100, deadline=None)
def test_what_does_not_fit_is_a_usage_error_and_what_fits_is_planned(host: Host, count: int, size: int) -> None:
    flags = f"--instances {count} --cores-per-instance {size}"
    if count * size <= pool_cores(host):
        assert len(plan(host, flags).workers) == count
        return
    with pytest.raises(UsageError, match=str(size)):
        plan(host, flags)
