"""Rules on a run that has ended: each finds its case, and nothing in a run without it."""

import pytest

from cpulaunch.launch.monitor.sampling import MAX_SIZES, add_size
from cpulaunch.launch.monitor.watch import Observation
from cpulaunch.launch.monitor.worker_report import WorkerReport
from cpulaunch.launch.supervision.findings import FIXES, RULES, findings, findings_json
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.probe.cgroups import throttling
from cpulaunch.records.host import Throttling
from cpulaunch.records.plan import LaunchOptions, LaunchPlan, WorkerPlan
from cpulaunch.system.root import Root

GNU, INTEL = "/lib/libgomp.so.1", "/lib/libiomp5.so"
MIB = 1 << 20
MAIN = {"pid": 10, "command": "python train.py", "openmp": [GNU], "pages": {"0": 900 * MIB}, "rss_bytes": 900 * MIB}


def snapshot(pid, cpus, **changes):
    return {**MAIN, "pid": pid, "threads": [{"cpus": cpus, "count": 2}], **changes}


def found(*, main=None, samples=None, conditions=None, memory=(), env=(), quota=None, preload="", load=0.5, **plan):
    worker = WorkerPlan(
        **{
            "index": 0,
            "cpus": frozenset({0, 1}),
            "numa_nodes": frozenset({0}),
            "mempolicy": "preferred",
            "threads": 2,
            "env": env,
            "argv": ("python", "train.py"),
        }
        | plan
    )
    report = WorkerReport(
        main_pid=10,
        live={10: MAIN | (main or {})},
        conditions={} if conditions is None else {10: conditions},
        metrics={"offered load": load},
    )
    observation = Observation(wall_seconds=100, report=report, samples=samples or {}, memory={10: tuple(memory)})
    ended = WorkerResult(index=0, pid=10, exit_code=0, signal=None, observation=observation)
    launch = LaunchPlan(
        mode="single",
        profile=None,
        world_size=1,
        workers=(worker,),
        notes=(),
        warnings=(),
        launch=LaunchOptions(),
    )
    return findings(launch, LaunchResult(exit_code=0, host="here", workers=(ended,)), quota, preload=preload)


CASES = {
    "two-openmp-runtimes": ({"main": {"openmp": [GNU, INTEL]}}, "gnu and intel"),
    "one-cpu-loaders": (
        {"samples": {pid: snapshot(pid, "0") for pid in (11, 12)}},
        "2 child processes may run on CPU 0",
    ),
    "remote-pages": ({"main": {"pages": {"0": 300 * MIB, "1": 100 * MIB}}}, "100 MiB of its memory, 25%"),
    "low-precision-fallback": ({"conditions": {"slow_precision": "bf16"}}, "matrix products in bf16"),
    "graph-breaks": (
        {"conditions": {"graph_breaks": {"call to print": 3, "x": 1}}},
        "4 times, most often: call to print",
    ),
    "growing-memory": ({"memory": [100 * MIB + 50 * MIB * number for number in range(10)]}, "from 350 MiB to 550 MiB"),
    "overloaded": ({"load": 1.5}, "its requests need 1.50 times the time in which they arrive"),
    "throttled": ({"quota": Throttling(periods=100, throttled=40)}, "40% of its periods"),
}


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_finds_its_case(rule):
    given, text = CASES[rule]
    assert [each.rule for each in found(**given)] == [rule]
    assert text in found(**given)[0].text
    assert found(**given)[0].line.startswith("finding: ")


def test_every_rule_has_a_case_and_a_fix():
    assert set(CASES) == set(FIXES) == {*RULES, "throttled"}


SILENT = {
    "an ordinary run": {"samples": {11: snapshot(11, "0-1")}},
    "a runtime that is preloaded": {"main": {"openmp": [GNU, INTEL]}, "env": (("LD_PRELOAD", INTEL),)},
    "a runtime that the user preloads": {"main": {"openmp": [GNU, INTEL]}, "preload": f"/lib/libtcmalloc.so {INTEL}"},
    "loaders on CPUs of their own": {"samples": {11: snapshot(11, "0"), 12: snapshot(12, "1")}},
    "one child": {"samples": {11: snapshot(11, "0")}},
    "other programs on one CPU": {"samples": {pid: snapshot(pid, "0", command="ssh") for pid in (11, 12)}},
    "a worker with one CPU": {
        "cpus": frozenset({0}),
        "samples": {pid: snapshot(pid, "0") for pid in (11, 12)},
    },
    "interleaved memory": {"main": {"pages": {"0": 300 * MIB, "1": 300 * MIB}}, "mempolicy": "interleave"},
    "a little remote memory": {"main": {"pages": {"0": 9000 * MIB, "1": 90 * MIB}}},
    "memory that settles": {"memory": [MIB * size for size in (100, 200, 400, 800, 800, 800, 801, 801)]},
    "memory of a short run": {"memory": [100 * MIB, 200 * MIB, 400 * MIB]},
    "weights that are loaded for half a minute": {"memory": [MIB * size for size in (100, 900, 1800, 2700, 3600)]},
    "a quota that is hardly reached": {"quota": Throttling(periods=1000, throttled=10)},
    "a short run under a quota": {"quota": Throttling(periods=5, throttled=5)},
    "a load that is no number": {"load": float("nan")},
    "a load without end": {"load": float("inf")},
    "sizes that no float holds": {"main": {"pages": {"1": "9" * 400}}},
    "NUMA nodes beyond all ids": {"main": {"pages": {"0": 300 * MIB, str(2**61 - 1): 300 * MIB}}},
    "sizes whose sum is zero": {"main": {"pages": {"0": -300 * MIB, "1": 300 * MIB}}},
    "events of another form": {"main": {"openmp": 3, "pages": [1]}, "conditions": {"graph_breaks": [1]}},
}


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_found_in(case):
    assert found(**SILENT[case]) == ()


def test_a_preload_that_the_plan_removes_is_none():
    (one,) = found(main={"openmp": [GNU, INTEL]}, preload=INTEL, env=(("LD_PRELOAD", None),))
    assert one.rule == "two-openmp-runtimes"


def test_json():
    (one,) = findings_json(found(conditions={"slow_precision": "bf16"}))
    assert (one["rule"], one["workers"], set(one)) == (
        "low-precision-fallback",
        [0],
        {"rule", "workers", "text", "fix"},
    )


def test_sizes_of_a_long_run_are_thinned_out():
    sizes = []
    for number in range(10 * MAX_SIZES):
        add_size(sizes, number)
    assert len(sizes) <= MAX_SIZES
    assert sizes == sorted(sizes)


def test_periods_of_a_quota(tmp_path):
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/job/cpu.stat": "usage_usec 5\nnr_periods 200\nnr_throttled 30\nother \u00b2\n",
        "sys/fs/cgroup/job/step/cpu.stat": "usage_usec 5\nnr_periods 0\nnr_throttled 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    root = Root(str(tmp_path))
    now = throttling(root)
    assert now == Throttling(periods=200, throttled=30)
    assert now.since(Throttling(periods=150, throttled=20)) == Throttling(periods=50, throttled=10)
