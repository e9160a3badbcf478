"""Properties of every job of ranks, on machines of any shape."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from cpulaunch.records.host import Host
from tests.plan.machines import plan, quota
from tests.plan.placement.test_properties import core_of, cores, hosts, pool_cores

UNITS = {"numa": "numa_node", "socket": "socket"}
BINDINGS = st.sampled_from(("node", "socket", "exclusive", "core-complex"))


@given(hosts(), st.data())
@settings(max_examples=200, deadline=None)
def test_ranks_are_equal_disjoint_and_inside_the_budget(host: Host, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, pool_cores(host)), label="ranks")
    workers = plan(host, f"--nproc-per-node {count}").workers
    assert len(workers) == count
    assert len({cores(host, worker) for worker in workers}) == 1
    assert len({worker.threads for worker in workers}) == 1
    assert all(worker.cpus and worker.cpus <= host.limits.budget.cpus for worker in workers)
    for one, other in combinations(workers, 2):
        assert not one.cpus & other.cpus


@given(hosts(), st.data())
@settings(max_examples=150, deadline=None)
def test_idle_cores_are_at_most_the_remainder_or_a_quarter(host: Host, data: st.DataObject) -> None:
    pool = pool_cores(host)
    count = data.draw(st.integers(1, pool), label="ranks")
    idle = pool - sum(cores(host, worker) for worker in plan(host, f"--nproc-per-node {count}").workers)
    assert idle <= max(pool // 4, pool % count)


@given(hosts(), st.data())
@settings(max_examples=100, deadline=None)
def test_more_ranks_than_cores_are_placed_and_warned_of(host: Host, data: st.DataObject) -> None:
    pool = pool_cores(host)
    made = plan(host, f"--nproc-per-node {data.draw(st.integers(pool + 1, 3 * pool + 3), label='ranks')}")
    assert any(f"on {pool} core" in warning for warning in made.warnings)
    assert all(worker.cpus and worker.cpus <= host.limits.budget.cpus for worker in made.workers)
    assert {worker.threads for worker in made.workers} == {1}


@given(hosts(), st.sampled_from(("numa", "socket", "l3")))
@settings(max_examples=100, deadline=None)
def test_ranks_per_unit_stay_inside_their_unit(host: Host, unit: str) -> None:
    workers = plan(host, f"--nproc-per-node {unit}").workers
    by_id = core_of(host)
    assert len({cores(host, worker) for worker in workers}) == 1
    homes = [
        {(cpu.socket, cpu.numa_node, cpu.l3) if unit == "l3" else getattr(cpu, UNITS[unit]) for cpu in own}
        for own in ([by_id[id_] for id_ in worker.cpus] for worker in workers)
    ]
    assert all(len(home) == 1 for home in homes)
    assert len({home.pop() for home in homes}) == len(workers)


@given(hosts(), BINDINGS, st.data())
@settings(max_examples=150, deadline=None)
def test_numa_binding_gives_equal_threads_that_fit(host: Host, binding: str, data: st.DataObject) -> None:
    nodes = {cpu.numa_node for cpu in host.cpus if cpu.id in plan(host).workers[0].cpus}
    by_id = core_of(host)
    here = [id_ for id_ in plan(host).workers[0].cpus]
    smallest = min(sum(by_id[id_].numa_node == node for id_ in here) for node in nodes)
    count = data.draw(st.integers(1, smallest * len(nodes)), label="ranks")
    workers = plan(host, f"--nproc-per-node {count} --numa-binding {binding}").workers
    assert len({worker.threads for worker in workers}) == 1
    assert sum(worker.threads for worker in workers) <= max(len(here), count)
    for worker in workers:
        assert len({by_id[id_].socket if binding == "socket" else by_id[id_].numa_node for id_ in worker.cpus}) == 1


@given(hosts(), st.floats(0.1, 40.0), st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_ranks_under_a_quota_have_equal_threads_within_it(host: Host, cpus: float, count: int) -> None:
    workers = plan(quota(host, cpus), f"--nproc-per-node {count}").workers
    assert len({worker.threads for worker in workers}) == 1
    paid = max(1, -int(-cpus // 1))
    assert sum(worker.threads for worker in workers) <= max(paid, count)
