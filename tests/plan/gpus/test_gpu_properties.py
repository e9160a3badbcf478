"""Properties of the ranks on any machine with GPUs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cpulaunch.records.host import Gpu, Host
from tests.plan.machines import machine, plan, replace


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    """Machines of 1 to 2 sockets and 1 to 4 NUMA nodes each, with GPUs anywhere."""
    sockets, nodes = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 4)))
    host = machine(sockets=sockets, nodes=nodes, l3s=draw(st.integers(1, 2)), cores=draw(st.integers(1, 5)), smt=2)
    places = draw(st.lists(st.one_of(st.none(), st.integers(0, sockets * nodes - 1)), min_size=1, max_size=8))
    return replace(
        host,
        gpus=tuple(
            Gpu(index=index, vendor="nvidia", pci=f"0000:{index:02x}:00.0", numa_node=node)
            for index, node in enumerate(places)
        ),
    )


BINDINGS = ("", " --numa-binding node", " --numa-binding socket", " --numa-binding core-complex", " --smt")


@settings(max_examples=150, deadline=None)
@given(host=hosts(), ranks=st.one_of(st.just("gpu"), st.integers(1, 10)), binding=st.sampled_from(BINDINGS))
def test_ranks_are_equal_near_and_apart(host: Host, ranks: int | str, binding: str) -> None:
    made = plan(host, f"--nproc-per-node {ranks}{binding}")
    nodes = {node.id: node.cpus for node in host.numa_nodes}
    assert len(made.workers) == (len(host.gpus) if ranks == "gpu" else ranks)
    for worker in made.workers:
        assert worker.gpu == worker.index % len(host.gpus)
        assert worker.cpus
        assert worker.threads >= 1
        home = host.gpus[worker.gpu].numa_node
        if home is not None and "socket" not in binding:
            assert worker.cpus <= nodes[home]
    if binding in ("", " --smt"):
        assert len({len(worker.cpus) for worker in made.workers}) == 1
        apart = sum(len(worker.cpus) for worker in made.workers) == len(
            frozenset[int]().union(*(worker.cpus for worker in made.workers))
        )
        assert apart or any("take turns" in warning for warning in made.warnings)
    assert made == plan(host, f"--nproc-per-node {ranks}{binding}")
