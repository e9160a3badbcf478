"""Limits of this process hold for the workers: CPU quota, cpuset and affinity of the running kernel."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from control_groups import ControlGroup

from tests import json_output

REPORT = Path(__file__).with_name("report.py")
CPULAUNCH = (sys.executable, "-m", "cpulaunch")
QUICK = ("--allocator", "default", "--openmp", "default")
"""No preloads: their trial starts are tested elsewhere."""
ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups and affinity are Linux's")
several_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs for a limit to show")
MakeGroup = Callable[[str], ControlGroup]


def run(command: Sequence[object]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)


def plan_command(*options: str) -> list[object]:
    return [*CPULAUNCH, "plan", "--json", *QUICK, *options, REPORT]


def run_command(*options: str) -> list[object]:
    return [*CPULAUNCH, *QUICK, *options, REPORT]


def parsed(result: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert result.returncode == 0, result.stderr
    return json_output.read("plan", result.stdout)


def worker_reports(result: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line[line.index("{") :]) for line in sorted(result.stdout.splitlines())]


def reasons(plan: dict[str, object]) -> str:
    return "\n".join(note["reason"] for note in plan["notes"])


@several_cpus
def test_without_a_limit_every_allowed_core_computes() -> None:
    (worker,) = parsed(run(plan_command()))["workers"]
    assert worker["threads"] > 1
    assert worker["env"]["OMP_NUM_THREADS"] == str(worker["threads"])


@pytest.mark.root
@several_cpus
@pytest.mark.parametrize("quota", [0.5, 1.0])
def test_quota_of_one_cpu_plans_one_thread_and_names_the_file(new_group: MakeGroup, quota: float) -> None:
    group = new_group("cpu")
    group.limit_cpus(quota)
    plan = parsed(group.run(plan_command()))
    (worker,) = plan["workers"]
    assert worker["threads"] == 1
    assert worker["env"]["OMP_NUM_THREADS"] == "1"
    assert f"quota {quota}" in reasons(plan)
    assert str(group.limit_file).lstrip("/") in reasons(plan)


@pytest.mark.root
@several_cpus
def test_worker_under_a_quota_is_limited_in_threads_and_not_pinned_to_a_core(new_group: MakeGroup) -> None:
    group = new_group("cpu")
    group.limit_cpus(1.0)
    (report,) = worker_reports(group.run(run_command()))
    assert report["threads"] == "1"
    assert len(report["cpus"]) > 1
    reports = worker_reports(group.run(run_command("--instances", "2")))
    assert [report["threads"] for report in reports] == ["1", "1"]
    assert all(len(report["cpus"]) > 1 for report in reports)


@pytest.mark.root
@several_cpus
def test_cpus_named_under_a_quota_are_bound(new_group: MakeGroup) -> None:
    group = new_group("cpu")
    group.limit_cpus(1.0)
    (report,) = worker_reports(group.run(run_command("--cpus", str(ALLOWED[-1]))))
    assert report["cpus"] == [ALLOWED[-1]]


@pytest.mark.root
@several_cpus
def test_fractions_of_a_quota_round_up(new_group: MakeGroup) -> None:
    group = new_group("cpu")
    group.limit_cpus(1.5)
    assert parsed(group.run(plan_command()))["workers"][0]["threads"] == 2


@pytest.mark.root
@several_cpus
def test_quota_of_an_ancestor_counts(new_group: MakeGroup) -> None:
    group = new_group("cpu")
    group.limit_cpus(1.0)
    plan = parsed(group.child().run(plan_command()))
    assert plan["workers"][0]["threads"] == 1
    assert str(group.limit_file).lstrip("/") in reasons(plan)


@pytest.mark.root
@several_cpus
def test_cpuset_is_the_pool(new_group: MakeGroup) -> None:
    group = new_group("cpuset")
    group.limit_file.write_text(str(ALLOWED[-1]))
    plan = parsed(group.run(plan_command()))
    (worker,) = plan["workers"]
    assert (worker["cpus"], worker["threads"]) == (str(ALLOWED[-1]), 1)
    assert "cpuset" in reasons(plan) or "affinity" in reasons(plan)
    (report,) = worker_reports(group.run(run_command()))
    assert report["cpus"] == [ALLOWED[-1]]


@several_cpus
@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not installed")
def test_taskset_is_the_pool() -> None:
    last = ALLOWED[-1]
    plan = parsed(run(["taskset", "-c", last, *plan_command()]))
    (worker,) = plan["workers"]
    assert (worker["cpus"], worker["threads"], worker["env"]["OMP_NUM_THREADS"]) == (str(last), 1, "1")
    assert f"affinity {last}" in reasons(plan)
    (report,) = worker_reports(run(["taskset", "-c", last, *run_command()]))
    assert (report["cpus"], report["threads"]) == ([last], "1")


@several_cpus
@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not installed")
def test_two_instances_do_not_fit_one_cpu() -> None:
    result = run(["taskset", "-c", ALLOWED[-1], *run_command("--instances", "2")])
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("cpulaunch: error: ")


@several_cpus
@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not installed")
def test_cpus_outside_the_affinity_are_refused() -> None:
    result = run(["taskset", "-c", ALLOWED[-1], *run_command("--cpus", str(ALLOWED[0]))])
    assert result.returncode == 2
    assert str(ALLOWED[0]) in result.stderr
