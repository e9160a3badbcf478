"""The machines of placements.txt by name."""

from tests.plan.machines import (
    GIB,
    cpuset,
    hybrid,
    isolated,
    machine,
    memory,
    offline,
    quota,
    taskset,
    two_sockets_per_node,
)

TWO = machine(sockets=2, cores=4, smt=2)

SHAPES = {
    "two-sockets": TWO,
    "adjacent-siblings": machine(cores=4, smt=2, numbering="adjacent"),
    "interleaved-nodes": machine(sockets=2, cores=4, numbering="interleaved"),
    "snc2": machine(sockets=2, nodes=2, cores=4, smt=2),
    "snc3": machine(nodes=3, cores=4),
    "nps4": machine(nodes=4, l3s=2, cores=4, vendor="AuthenticAMD"),
    "nps1": machine(l3s=8, cores=8, vendor="AuthenticAMD"),
    "l3-as-numa": machine(sockets=2, nodes=8, cores=4, smt=2, vendor="AuthenticAMD"),
    "hybrid": hybrid(machine(cores=6), "2-5"),
    "one-performance-core": hybrid(machine(cores=5), "1-4"),
    "only-efficiency-cores": hybrid(machine(cores=4), "0-3"),
    "offline-cpus": offline(machine(sockets=2, cores=4, smt=2), "1,8,12-13"),
    "hbm-nodes": memory(memory(machine(sockets=2, cores=4), 2, GIB), 3, GIB),
    "one-node-and-cxl": memory(machine(cores=4), 1, GIB),
    "memory-less-node": memory(machine(sockets=2, cores=4), 1, 0),
    "two-of-eight-nodes-memory-less": memory(memory(machine(sockets=8, cores=2), 0, 0), 7, 0),
    "cpuset-in-a-socket": cpuset(TWO, "2-3,10-11"),
    "cpuset-of-single-siblings": cpuset(machine(cores=4, smt=2), "1,4,6"),
    "cpuset-over-unequal-nodes": cpuset(machine(sockets=2, cores=8), "0-9"),
    "cpuset-mems-elsewhere": cpuset(machine(sockets=2, cores=4), "4-7", mems="0"),
    "taskset-1": taskset(machine(cores=2), "1"),
    "one-cpu": machine(cores=1),
    "no-numa-two-sockets": machine(sockets=2, cores=4, numa=False),
    "vm-with-a-socket-per-core": machine(sockets=8, cores=1, numa=False),
    "two-nodes-of-two-sockets": two_sockets_per_node(machine(sockets=4, cores=2)),
    "quota-2.5": quota(TWO, 2.5),
    "quota-1-node-1-freer": quota(
        memory(memory(machine(sockets=2, cores=4), 0, 64 * GIB, free=GIB), 1, 64 * GIB, free=2 * GIB), 1.0
    ),
    "quota-wider-than-a-node": quota(machine(sockets=2, cores=4), 6.0),
    "quota-above-the-machine": quota(machine(sockets=2, cores=4), 64.0),
    "quota-hybrid": quota(hybrid(machine(cores=8), "4-7"), 2.0),
    "quota-isolated-cpus": quota(isolated(machine(cores=8), "4-7"), 2.0),
    "quota-in-a-cpuset": quota(cpuset(machine(sockets=2, cores=4), "0-3"), 1.0),
    "isolated": isolated(machine(cores=4), "2-3"),
    "all-isolated": taskset(isolated(machine(cores=4), "2-3"), "2-3"),
    "1024-cpus": machine(sockets=2, nodes=4, l3s=8, cores=8, smt=2),
    "four-sockets": machine(sockets=4, cores=4),
}
