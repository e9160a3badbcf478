"""Plan, result, events and samples -> the report."""

import time
import tracemalloc

import pytest

from cpulaunch.launch.monitor.sampling import MAX_SNAPSHOTS, keep, pause_before
from cpulaunch.launch.monitor.watch import Observation
from cpulaunch.launch.monitor.worker_report import WorkerReport
from cpulaunch.launch.output.metrics import Metric
from cpulaunch.launch.supervision.report import (
    MAX_PATH,
    binding,
    flags_without_effect,
    metric_lines,
    report,
    worker_lines,
)
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.records.plan import LaunchOptions, LaunchPlan, WorkerPlan
from cpulaunch.records.torch_settings import VARIABLE, TorchSettings, encode
from cpulaunch.view.plan_view import plan_json
from tests import json_output

GB = 1 << 30


def plan(*, workers=1, cpus=(0, 1), settings=None, **launch):
    return LaunchPlan(
        mode="instances",
        profile=None,
        world_size=workers,
        workers=tuple(
            WorkerPlan(
                index=index,
                cpus=frozenset(cpus),
                numa_nodes=frozenset(),
                mempolicy="none",
                threads=2,
                env=() if settings is None else ((VARIABLE, encode(settings)),),
                argv=("python",),
            )
            for index in range(workers)
        ),
        notes=(),
        warnings=(),
        launch=LaunchOptions(**launch),
    )


def worker(index=0, *, status=0, observation=None, metric=None):
    return WorkerResult(
        index=index,
        pid=100 + index,
        exit_code=status if status >= 0 else None,
        signal=-status if status < 0 else None,
        metric=metric,
        observation=Observation(wall_seconds=1.23456) if observation is None else observation,
    )


def result(*workers, exit_code=0):
    return LaunchResult(exit_code=exit_code, host="here", workers=workers or (worker(),), wall_seconds=2.0)


def live(pid, *, peak=GB, masks=("0-1",)):
    return {"pid": pid, "threads": [{"cpus": mask, "count": 1} for mask in masks], "peak_memory_bytes": peak}


def reported(observation, **options):
    """The one worker's part of a report."""
    return whole(plan(**options), result(worker(observation=observation)))["workers"][0]


def whole(planned, ended):
    """The report, which obeys its schema."""
    return json_output.checked("report", report(planned, ended, version="1", plan_json=plan_json(planned)))


def test_a_worker_without_events_is_reported():
    assert whole(plan(), result(worker(status=-9), exit_code=137)) == {
        "schema": 1,
        "cpulaunch": "1",
        "host": "here",
        "exit_code": 137,
        "wall_seconds": 2.0,
        "world_size": 1,
        "metrics": {},
        "findings": [],
        "plan": plan_json(plan()),
        "workers": [
            {
                "index": 0,
                "pid": 100,
                "exit_code": None,
                "signal": 9,
                "wall_seconds": 1.235,
                "peak_memory_bytes": None,
                "plugin": "not loaded",
                "settings": {},
                "graph": {"captured": [], "eager": [], "frozen_bytes": 0, "seconds": None, "budget_seconds": None},
                "chosen": [],
                "weights": [],
                "binding": None,
                "metrics": {},
                "checksums": {},
                "warnings": [],
                "ignored_events": 0,
                "unread_event_bytes": 0,
            }
        ],
    }


def test_the_facts_of_a_worker_report_are_in_the_run_report():
    settings = {"graph": {"state": "degraded", "detail": "why"}}
    captured = ({"module": "a", "frozen_bytes": 3}, {"module": "b", "frozen_bytes": 4}, {"module": "c"})
    own = WorkerReport(
        main_pid=100,
        settings=settings,
        captured=captured,
        captures={100: {"seconds": 2.5, "budget": 60.0}, 101: {"seconds": 1, "budget": 60.0}},
        warnings=("w",),
        metrics={"x": 1.0},
    )
    part = reported(Observation(wall_seconds=1, report=own))
    assert part["plugin"] == "loaded"
    assert part["settings"] == settings
    expected = {"captured": list(captured), "eager": [], "frozen_bytes": 7, "seconds": 3.5, "budget_seconds": 60.0}
    assert part["graph"] == expected
    assert part["warnings"] == ["w"]
    assert part["metrics"] == {"x": 1.0}


@pytest.mark.parametrize(
    ("own", "samples", "pid"),
    [
        ({}, {}, None),
        ({}, {100: 1, 101: 5}, 101),
        ({}, {100: 5, 101: 5}, 100),
        ({100: 1, 101: 5}, {}, 101),
        ({101: 5}, {100: 1}, 101),
    ],
    ids=[
        "no process",
        "the program inside a shell",
        "the worker itself",
        "the largest",
        "own report and samples alike",
    ],
)
def test_the_binding_is_that_of_the_largest_process(own, samples, pid):
    observation = Observation(
        wall_seconds=1,
        report=WorkerReport(live={number: live(number, peak=peak) for number, peak in own.items()}),
        samples={number: live(number, peak=peak) for number, peak in samples.items()},
    )
    binding = reported(observation)["binding"]
    assert (binding and binding["pid"]) == pid


def test_the_process_with_the_plugin_precedes_a_larger_one():
    samples = {101: live(101, peak=1), 102: live(102, peak=5)}
    assert (
        reported(Observation(wall_seconds=1, report=WorkerReport(main_pid=101), samples=samples))["binding"]["pid"]
        == 101
    )


def test_facts_from_the_process_itself_precede_its_samples():
    observation = Observation(
        wall_seconds=1,
        report=WorkerReport(live={100: live(100, masks=["0"])}),
        samples={100: live(100, masks=["1", "2"])},
    )
    assert reported(observation)["binding"]["threads"] == [{"cpus": "0", "count": 1}]


@pytest.mark.parametrize(
    ("cpus", "masks", "as_planned"),
    [
        ((0, 1), ["0-1"], True),
        ((0, 1), ["0", "1", "0-1"], True),
        ((0, 1), ["0-1", "0-3"], False),
        ((0, 1), ["2"], False),
        ((), ["0-3"], None),
        ((0, 1), [], None),
    ],
)
def test_a_binding_is_as_planned_if_no_thread_may_run_elsewhere(cpus, masks, as_planned):
    observation = Observation(wall_seconds=1, samples={100: live(100, masks=masks)})
    assert reported(observation, cpus=cpus)["binding"]["as_planned"] is as_planned


@pytest.mark.parametrize("odd", [[None], [{}], [1], 1, [{"cpus": [0]}], [{"cpus": 1}], [{"cpus": "x"}], {"cpus": "0"}])
def test_masks_in_another_form_say_nothing_about_the_binding(odd):
    observation = Observation(wall_seconds=1, samples={100: {**live(100), "threads": odd}})
    assert binding(observation, worker(), plan().workers[0])["as_planned"] is None


@pytest.mark.parametrize(
    ("masks", "as_planned"),
    [
        (["0-16384"] * 3000, False),
        ([f"{'0' * number}-16384" for number in range(1, 19)] * 1000, False),
        ([f"0-1,{'0,' * number}0" for number in range(5000)], None),
    ],
)
def test_many_masks_take_little_memory_and_time(masks, as_planned):
    """A process may write anything as the snapshot of itself."""
    observation = Observation(wall_seconds=1, samples={100: live(100, masks=masks)})
    began = time.process_time()
    tracemalloc.start()
    assert binding(observation, worker(), plan().workers[0])["as_planned"] is as_planned
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 25
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("rusage", "own", "sampled", "peak"),
    [(None, None, None, None), (3, None, None, 3), (3, 5, 4, 5), (3, None, 4, 4), (7, 5, 4, 7)],
)
def test_the_peak_is_the_highest_value_known(rusage, own, sampled, peak):
    observation = Observation(
        wall_seconds=1,
        peak_memory_bytes=rusage,
        report=WorkerReport(live={100: {"pid": 100, "peak_memory_bytes": own}}),
        samples={101: {"pid": 101, "peak_memory_bytes": sampled}},
    )
    assert reported(observation)["peak_memory_bytes"] == peak


def read(pattern, *lines):
    metric = Metric(pattern)
    metric.search(lines)
    return metric


def with_metrics(**metrics):
    return Observation(wall_seconds=1, report=WorkerReport(metrics=metrics))


def test_metrics_from_output_and_program_are_summed_by_name():
    pattern = "tokens/s: (.*)"
    workers = (
        worker(0, metric=read(pattern, b"tokens/s: 2"), observation=with_metrics(x=1.0)),
        worker(1, metric=read(pattern, b"tokens/s: 3"), observation=with_metrics()),
    )
    made = whole(plan(workers=2, metric=pattern), result(*workers))
    assert made["metrics"] == {
        "tokens/s": {"sum": 5.0, "values": [2.0, 3.0]},
        "x": {"sum": 1.0, "values": [1.0, None]},
    }
    assert [each["metrics"] for each in made["workers"]] == [{"tokens/s": 2.0, "x": 1.0}, {"tokens/s": 3.0}]
    assert metric_lines(plan(workers=2, metric=pattern), result(*workers)) == ("tokens/s: 5 (2 + 3)", "x: 1")


def test_a_metric_set_by_the_program_wins_over_its_output():
    one = worker(metric=read("x (.*)", b"x 1"), observation=with_metrics(x=2.0))
    assert whole(plan(metric="x (.*)"), result(one))["metrics"]["x"]["sum"] == 2


def test_the_terminal_shows_only_the_first_of_many_metrics():
    found = [WorkerReport(metrics={f"{index}-{number}": 1.0 for number in range(60)}) for index in (0, 1)]
    workers = [worker(index, observation=Observation(wall_seconds=1, report=each)) for index, each in enumerate(found)]
    lines = metric_lines(plan(workers=2), result(*workers))
    assert (len(lines), lines[0], lines[99]) == (101, "0-0: 1", "1-39: 1")
    assert lines[100] == "and 20 more metrics (--report FILE.json has all)"


@pytest.mark.parametrize(
    ("lines", "exit_code", "said"),
    [
        ([], 0, ("warning: --metric matched nothing in the output of worker 0",)),
        ([b"x n/a"], 0, ("warning: --metric matched 'n/a', which is not a number, in the output of worker 0",)),
        ([], 3, ()),
        ([b"x 1"], 0, ("x: 1",)),
    ],
)
def test_a_requested_metric_that_no_output_holds_is_mentioned(lines, exit_code, said):
    one = worker(metric=read("x (.*)", *lines))
    assert metric_lines(plan(metric="x (.*)"), result(one, exit_code=exit_code)) == said


def test_lines_that_the_pattern_took_too_long_for_are_mentioned():
    skipping, giving_up = read("x (.*)", b"x 1"), read("x (.*)", b"x " + b"n" * 500)
    skipping.skipped, giving_up.skipped = 1, 2
    workers = worker(0, metric=skipping), worker(1, metric=giving_up)
    assert metric_lines(plan(workers=2, metric="x (.*)"), result(*workers)) == (
        "x: 1",
        "warning: --metric takes too long for the output: 3 lines of workers 0-1, and what followed, were not searched",
    )
    assert metric_lines(plan(workers=2, metric="x (.*)"), result(workers[0]))[1].endswith(
        "1 line of worker 0 was not searched"
    )


LOADED = Observation(wall_seconds=1, report=WorkerReport(main_pid=100))


@pytest.mark.parametrize(
    ("settings", "workers", "exit_code", "missing"),
    [
        (TorchSettings(precision="bf16", prefetch=3), [None], 0, ("--precision", "--prefetch")),
        (TorchSettings(debug_apis=False), [None, None], 0, ("--no-debug-apis",)),
        (TorchSettings(dist_backend="ccl"), [None], 0, ("--dist-backend",)),
        (TorchSettings(precision="bf16"), [None, LOADED], 0, ("--precision",)),
        (TorchSettings(precision="bf16"), [LOADED, LOADED], 0, ()),
        (TorchSettings(precision="bf16"), [None], 3, ()),
        (TorchSettings(threads=2, cpus="0-1", restore_preload=True), [None], 0, ()),
        (None, [None], 0, ()),
    ],
    ids=[
        "none loaded",
        "two of them",
        "a backend",
        "one loaded",
        "both loaded",
        "a failure",
        "nothing asked",
        "no plugin",
    ],
)
def test_settings_without_a_plugin_to_apply_them_are_named(settings, workers, exit_code, missing):
    ended = [worker(index, observation=observation) for index, observation in enumerate(workers)]
    asked = plan(workers=len(workers), settings=settings)
    assert flags_without_effect(asked, result(*ended, exit_code=exit_code)) == missing


def test_samples_become_rarer():
    assert [pause_before(look) for look in range(6)] == [0.2, 1.0, 3.0, 10.0, 10.0, 10.0]


def sample(pid=1, *, rss=1, pages=None):
    threads = [{"cpus": "0", "count": 1}]
    return {"pid": pid, "threads": threads, "rss_bytes": rss, "peak_memory_bytes": rss, "pages": pages or {}}


def test_the_last_good_sample_is_kept():
    snapshots = {}
    keep(snapshots, sample(pages={"0": 5}), pages=True)
    keep(snapshots, sample(rss=2), pages=False)
    keep(snapshots, {**sample(), "rss_bytes": None}, pages=True)
    keep(snapshots, {**sample(), "threads": []}, pages=True)
    assert snapshots == {1: sample(rss=2, pages={"0": 5})}


def test_of_many_short_lived_children_the_smallest_are_forgotten():
    snapshots = {}
    keep(snapshots, sample(0, rss=GB), pages=True)
    for pid in range(1, 10 * MAX_SNAPSHOTS):
        keep(snapshots, sample(pid, rss=pid), pages=True)
    assert len(snapshots) == MAX_SNAPSHOTS
    assert 0 in snapshots


@pytest.mark.parametrize(
    ("path", "lines"),
    [("/lib/libomp.so", ("OpenMP runtime: /lib/libomp.so",)), ("/" * (MAX_PATH + 1), ())],
    ids=["a path", "longer than any path"],
)
def test_the_runtime_of_openmp_is_a_line_if_it_is_a_path(path, lines):
    told = WorkerReport(main_pid=100, live={100: {"openmp_path": path}})
    assert worker_lines(result(worker(observation=Observation(wall_seconds=1, report=told)))) == lines
