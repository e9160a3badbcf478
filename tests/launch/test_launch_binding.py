"""CPUs and memory policies apply from a worker's first instruction, as the worker itself reports."""

import errno
import os
import platform
import sys

import pytest

from cpulaunch.launch.process.bind import candidate_policies
from cpulaunch.system.mempolicy import (
    MPOL_BIND,
    MPOL_INTERLEAVE,
    MPOL_PREFERRED,
    MPOL_PREFERRED_MANY,
    Policy,
    get_policy,
    set_policy,
)
from tests.launch.launching import python, refusing

CPUS = sorted(os.sched_getaffinity(0))
NODES = os.path.isdir("/sys/devices/system/node/node0")
needs_numa = pytest.mark.skipif(not NODES, reason="this kernel has no NUMA nodes")
needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="this process may use one CPU only")
needs_filter = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"),
    reason="system call numbers of this architecture are not in the test",
)

SEEN = """
    import threading
    def seen():
        with open("/proc/thread-self/status") as status, open("/proc/self/numa_maps") as maps:
            cpus = next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list"))
            print(cpus, maps.readline().split()[1])
    thread = threading.Thread(target=seen)
    seen(), thread.start(), thread.join()
"""


def worker(cpu, mempolicy="none"):
    return {
        "argv": python(SEEN),
        "cpus": [cpu],
        "mempolicy": mempolicy,
        "numa_nodes": [] if mempolicy == "none" else [0],
    }


@needs_numa
@pytest.mark.parametrize(
    ("mempolicy", "kernel_name"),
    [("preferred", "prefer:0"), ("bind", "bind:0"), ("interleave", "interleave:0"), ("none", "default")],
)
@pytest.mark.parametrize("copies", [1, 2], ids=["exec", "supervised"])
def test_every_thread_is_bound(launcher, mempolicy, kernel_name, copies):
    workers = [worker(CPUS[-1], mempolicy)] * copies
    outcome = launcher.run(*workers, show=None if copies == 1 else [0])
    assert outcome.lines == [f"{CPUS[-1]} {kernel_name}"] * 2
    assert outcome.error == ""


@needs_two_cpus
def test_each_worker_has_its_own_cpus(launcher):
    outcome = launcher.run(worker(CPUS[0]), worker(CPUS[1]))
    seen = sorted(line.split()[:2] for line in outcome.lines)  # Two lines each, in any order.
    assert seen == [["[0]", str(CPUS[0])]] * 2 + [["[1]", str(CPUS[1])]] * 2


@needs_two_cpus
def test_unbound_workers_inherit(launcher):
    unbound = {"argv": python(SEEN)}
    lines = launcher.run(worker(CPUS[0]), unbound, show=[1]).lines
    with open("/proc/self/status") as status:
        own = next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list"))
    assert lines[0].split()[0] == own


def test_another_binder_leaves_the_worker_unbound(launcher):
    lines = launcher.run(worker(CPUS[-1], "bind"), binder="none").lines
    assert lines[0].split()[1] == "default"


@pytest.mark.parametrize("copies", [1, 2])
def test_cpus_that_do_not_exist_are_an_error(launcher, copies):
    outcome = launcher.run(*[{"argv": ["touch", "started"], "cpus": [8191]}] * copies)
    assert outcome.code == 125
    assert outcome.error == (
        "cpulaunch: error: worker 0 cannot be bound: CPUs 8191 (sched_setaffinity: Invalid argument)\n"
        "hint: run `cpulaunch probe` to see what this process may use\n"
    )
    assert not (launcher.dir / "started").exists()


def test_partly_missing_cpus_are_a_warning(launcher):
    partly = {"argv": python(SEEN), "cpus": [CPUS[0], 8191]}
    outcome = launcher.run(partly)
    assert outcome.code == 0
    assert outcome.error == (
        "cpulaunch: warning: worker 0 does not get all its CPUs: the kernel withholds 8191; "
        "run `cpulaunch probe` to see what this process may use\n"
    )
    assert launcher.run(partly, strict=True).code == 125


@needs_numa
def test_numa_nodes_that_do_not_exist_are_an_error(launcher):
    bound = {"argv": ["touch", "started"], "mempolicy": "bind", "numa_nodes": [900]}
    outcome = launcher.run(bound, bound)
    assert outcome.code == 125
    assert (
        "cpulaunch: error: worker 0 cannot be bound: NUMA nodes 900 (set_mempolicy: Invalid argument)" in outcome.error
    )
    assert not (launcher.dir / "started").exists()


@needs_filter
@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.EPERM, "in a container, use --cap-add SYS_NICE or a seccomp profile that allows set_mempolicy"),
        (errno.ENOSYS, "this kernel has no NUMA memory policies; use --membind none"),
    ],
)
@pytest.mark.parametrize("calls", [("set_mempolicy",), ("set_mempolicy", "get_mempolicy")])
@pytest.mark.parametrize("copies", [1, 2], ids=["exec", "supervised"])
def test_a_refused_memory_policy_keeps_the_cpus_and_warns_once(launcher, calls, code, hint, copies):
    workers = [worker(CPUS[-1], "preferred")] * copies
    outcome = launcher.run(*workers, prefix=refusing(*calls, code=code), show=None if copies == 1 else [0])
    assert outcome.lines == [f"{CPUS[-1]} default"] * 2
    assert outcome.code == 0
    assert outcome.error == (
        f"cpulaunch: warning: memory is not bound (CPUs are): set_mempolicy: {os.strerror(code)}; {hint}\n"
    )


@needs_filter
@pytest.mark.parametrize("copies", [1, 2])
def test_strict_makes_a_refused_memory_policy_an_error(launcher, copies):
    refused = {**worker(CPUS[-1], "preferred"), "argv": ["touch", "started"]}
    outcome = launcher.run(*[refused] * copies, prefix=refusing("set_mempolicy", code=errno.EPERM), strict=True)
    assert outcome.code == 125
    assert outcome.error == (
        "cpulaunch: error: memory is not bound (CPUs are): set_mempolicy: Operation not permitted (--strict)\n"
        "hint: in a container, use --cap-add SYS_NICE or a seccomp profile that allows set_mempolicy\n"
    )
    assert not (launcher.dir / "started").exists()


@needs_filter
def test_refused_cpus_are_a_warning(launcher):
    outcome = launcher.run(worker(CPUS[-1]), prefix=refusing("sched_setaffinity", code=errno.EPERM))
    assert outcome.code == 0
    assert "warning: workers are not bound to CPUs: sched_setaffinity: Operation not permitted" in outcome.error


@needs_numa
def test_the_launchers_own_policy_reaches_workers_without_one(launcher, tmp_path):
    # As under `numactl --interleave=0 cpulaunch …`: trying worker 0's policy must not lose it.
    interleaved = (
        "import os, sys; from cpulaunch.system.mempolicy import *; "
        "set_policy(Policy(mode=MPOL_INTERLEAVE, numa_nodes=frozenset({0}))); os.execv(sys.argv[1], sys.argv[1:])"
    )
    unbound = {"argv": python(SEEN)}
    outcome = launcher.run(worker(CPUS[0], "bind"), unbound, show=[1], prefix=[sys.executable, "-c", interleaved])
    assert outcome.lines[0].split()[1] == "interleave:0"


@needs_numa
def test_a_policy_read_back_is_the_one_that_was_set():
    before = get_policy()
    try:
        policy = Policy(mode=MPOL_INTERLEAVE, numa_nodes=frozenset({0}))
        set_policy(policy)
        assert get_policy() == policy
    finally:
        set_policy(before)
    assert get_policy() == before


def test_no_ctypes_without_a_memory_policy(launcher):
    # It takes milliseconds to import, and PYTHONVERBOSE tells every import.
    outcome = launcher.run({"argv": ["/bin/true"], "cpus": [CPUS[0]]}, env={"PYTHONVERBOSE": "1"})
    assert "cpulaunch.launch.process.bind" in outcome.error
    assert "ctypes" not in outcome.error


@pytest.mark.parametrize(
    ("mempolicy", "nodes", "tried"),
    [
        ("none", {0, 1}, []),
        ("preferred", set(), []),
        ("preferred", {3}, [(MPOL_PREFERRED, {3})]),
        ("preferred", {1, 0}, [(MPOL_PREFERRED_MANY, {0, 1}), (MPOL_PREFERRED, {0})]),
        ("bind", {1, 0}, [(MPOL_BIND, {0, 1})]),
        ("interleave", {1, 0}, [(MPOL_INTERLEAVE, {0, 1})]),
    ],
)
def test_kernels_before_preferred_many_get_the_first_node(mempolicy, nodes, tried):
    assert [
        (policy.mode, set(policy.numa_nodes)) for policy in candidate_policies(mempolicy, frozenset(nodes))
    ] == tried
