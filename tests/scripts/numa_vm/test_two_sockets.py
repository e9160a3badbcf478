"""On an emulated two-socket NUMA machine: CPUs, threads, memory policy and pages of every worker are as planned.

The machine has 2 sockets of 2 cores with 2 hardware threads each (CPUs 0-3 and 4-7, siblings adjacent), one NUMA node
per socket, and a third NUMA node with memory and no CPU.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NUMA_VM = ROOT / "scripts/numa-vm"
CHECK = Path(__file__).with_name("check.py")
QUICK = ["--allocator", "default", "--openmp", "default"]
CASES = {
    "plain": ["--instances", "2"],
    "numactl": ["--instances", "2", "--binder", "numactl", *QUICK],
    "bind": ["--instances", "2", "--membind", "bind", *QUICK],
    "one": [*QUICK, "--log-dir", "/tmp/one"],
    "exec": ["--numa-nodes", "1", *QUICK],
    "smt": ["--instances", "2", "--smt", "--membind", "interleave", *QUICK],
    "four": ["--instances", "4", *QUICK],
    "unbound": ["--instances", "2", "--binder", "none", *QUICK],
}
UNPRIVILEGED_CASES = ["plain", "numactl", "exec"]
UNPRIVILEGED = "65534"
CGROUPS = ROOT / "tests/launch/cgroups"
LIMITS = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={CGROUPS}"),
    *("-k", "ancestor or worker_under or cpuset or out_of_memory", CGROUPS),
)
PAGES = 4096
NOT_STARTED = 125

as_root = pytest.mark.parametrize("user", ["root"])
as_root_and_unprivileged = pytest.mark.parametrize("user", ["root", UNPRIVILEGED])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs x86_64 Linux"),
    pytest.mark.skipif(
        os.name == "posix" and os.geteuid() != 0 and shutil.which("qemu-system-x86_64") is None,
        reason="qemu-system-x86_64 is not installed and only root can install it",
    ),
]


@cache
def machine() -> subprocess.CompletedProcess[str]:
    """All launches and the tests of limits, from one boot (scripts/test runs the tests of a file in one process)."""
    cases = {"root": CASES, UNPRIVILEGED: {name: CASES[name] for name in UNPRIVILEGED_CASES}}
    options = ["--memory-only-node", "--timeout", "1200"]
    command = [sys.executable, NUMA_VM, *options, sys.executable, CHECK, json.dumps(cases), *LIMITS]
    # Without plugins and tests/conftest.py, the machine's pytest starts half a minute earlier.
    added = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for _ in range(2):
        ran = subprocess.run(list(map(str, command)), env=os.environ | added, capture_output=True, text=True)
        if ran.returncode != NOT_STARTED:  # Else the emulator crashed: no result about cpulaunch.
            break
    return ran


def results() -> dict[str, Any]:
    """The launches of each user by case, and the end of the tests of limits."""
    assert machine().returncode == 0, machine()
    return json.loads(machine().stdout)


def column(user: str, case: str, *keys: str) -> list[object]:
    """The values that every worker of a case reported for these keys."""
    launch = results()[user][case]
    assert launch["exit_code"] == 0, launch["stderr"]
    values = [tuple(worker[key] for key in keys) for worker in launch["workers"]]
    return [value[0] for value in values] if len(keys) == 1 else values


@as_root_and_unprivileged
@pytest.mark.parametrize("case", ["plain", "numactl"])
def test_two_instances_take_one_socket_each(user: str, case: str) -> None:
    if case == "numactl" and shutil.which("numactl") is None:
        pytest.skip("numactl is not installed")
    assert column(user, case, "cpus", "thread_cpus", "threads") == [("0,2", "0,2", "2"), ("4,6", "4,6", "2")]
    assert column(user, case, "policy", "pages") == [("prefer:0", {"0": PAGES}), ("prefer:1", {"1": PAGES})]


@as_root
def test_memory_is_bound_strictly_on_request_only(user: str) -> None:
    assert column(user, "bind", "cpus") == ["0,2", "4,6"]
    assert column(user, "bind", "policy", "pages") == [("bind:0", {"0": PAGES}), ("bind:1", {"1": PAGES})]


@as_root_and_unprivileged
def test_workers_run_as_the_user_of_the_launch(user: str) -> None:
    expected = 0 if user == "root" else int(UNPRIVILEGED)
    assert column(user, "plain", "uid") == [expected, expected]


@as_root_and_unprivileged
def test_the_only_worker_is_bound_before_it_replaces_the_launcher(user: str) -> None:
    assert column(user, "exec", "cpus", "policy", "pages") == [("4,6", "prefer:1", {"1": PAGES})]


@as_root
def test_one_worker_over_both_sockets_interleaves_memory(user: str) -> None:
    half = PAGES // 2
    assert column(user, "one", "cpus", "threads") == [("0,2,4,6", "4")]
    assert column(user, "one", "policy", "pages") == [("interleave:0-1", {"0": half, "1": half})]


@as_root
def test_siblings_are_used_on_request_only(user: str) -> None:
    assert column(user, "smt", "cpus", "threads") == [("0-3", "4"), ("4-7", "4")]
    assert column(user, "smt", "policy") == ["interleave:0", "interleave:1"]


@as_root
def test_four_instances_take_one_core_each(user: str) -> None:
    assert column(user, "four", "cpus", "threads") == [("0", "1"), ("2", "1"), ("4", "1"), ("6", "1")]
    assert column(user, "four", "pages") == [{"0": PAGES}, {"0": PAGES}, {"1": PAGES}, {"1": PAGES}]


@as_root
def test_unbound_workers_may_run_anywhere(user: str) -> None:
    """The control: without binding, the placement that the other tests find does not occur."""
    assert column(user, "unbound", "cpus", "policy") == [("0-7", "default"), ("0-7", "default")]


def test_limits_hold_under_cgroup_version_2() -> None:
    """The tests of limits on real cgroups, repeated on a kernel with cgroup version 2, which the host may lack."""
    ran = results()["command"]
    assert (ran["exit_code"], "skipped" in ran["output"]) == (0, False), ran
