"""Events -> a worker's report: which process decides, and which lines are ignored."""

import json
import time
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpulaunch.launch.monitor import worker_report
from cpulaunch.launch.monitor.watch import Observation
from cpulaunch.launch.monitor.worker_report import WorkerReport, read_event_file, read_worker_report
from cpulaunch.launch.supervision.report import report, worker_lines
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.records.plan import LaunchOptions, LaunchPlan, WorkerPlan


def told(*events):
    return read_worker_report([json.dumps(event) + "\n" for event in events])


def ended(found):
    """The result of a launch whose only worker reported this."""
    observation = Observation(wall_seconds=1, report=found)
    worker = WorkerResult(index=0, pid=1, exit_code=0, signal=None, observation=observation)
    return LaunchResult(exit_code=0, host="here", workers=(worker,))


def report_on(found):
    worker = WorkerPlan(
        index=0, cpus=frozenset({0}), numa_nodes=frozenset(), mempolicy="none", threads=1, env=(), argv=("python",)
    )
    plan = LaunchPlan(
        mode="single", profile=None, world_size=1, workers=(worker,), notes=(), warnings=(), launch=LaunchOptions()
    )
    return report(plan, ended(found), version="1", plan_json={})


def event(kind, pid=10, **facts):
    return {"event": kind, "pid": pid, **facts}


def applied(setting, detail, pid=10):
    return event("applied", pid, setting=setting, detail=detail)


def degraded(setting, reason, pid=10):
    return event("degraded", pid, setting=setting, reason=reason)


def test_without_events_no_plugin_is_loaded():
    assert read_worker_report([]) == WorkerReport()


def test_a_metric_alone_does_not_show_a_plugin():
    metrics = told(event("metric", name="a", value=1))
    assert metrics.main_pid is None
    assert metrics.metrics == {"a": 1.0}


@pytest.mark.parametrize("depth", [20, 300, 900, 960, 985])
def test_an_event_that_is_nested_deeper_than_a_report_can_be_is_ignored(depth):
    """Python reads it, but could not write it: neither in a list of captures nor in the report, with its indent."""
    nested = "[" * depth + "]" * depth
    kinds = ("captured", "chosen", "weights", "live", "conditions", "checksum", "degraded", "warning")
    lines = [f'{{"event": "{kind}", "pid": 1, "name": "x", "module": {nested}, "value": [{nested}]}}' for kind in kinds]
    found = read_worker_report([*lines, json.dumps(event("metric", name="a", value=1))])
    assert (found.ignored, found.metrics) == (len(kinds), {"a": 1.0})
    json.dumps(report_on(found), indent=2)


ON, OFF = {"state": "applied", "detail": "on"}, {"state": "degraded", "detail": "off"}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([applied("graph", "on")], ON),
        ([degraded("graph", "off")], OFF),
        ([applied("graph", "on"), degraded("graph", "off")], OFF),
        ([applied("graph", "on"), degraded("graph", "off", pid=11)], ON),
        ([applied("threads", "2"), degraded("graph", "off", pid=11), applied("graph", "on")], ON),
        ([applied("threads", "2"), applied("graph", "on", pid=11), degraded("graph", "off", pid=12)], OFF),
    ],
    ids=["applied", "degraded", "its last word", "not its child's", "nor before it", "children without it"],
)
def test_the_main_process_decides_the_state_of_a_setting(events, expected):
    assert told(*events).settings["graph"] == expected


def test_the_last_metric_of_each_name_counts_from_any_process():
    metrics = [("a", 1, 10), ("b", 5, 10), ("a", 2, 11), ("a", 3, 10)]
    assert told(*(event("metric", pid, name=n, value=v) for n, v, pid in metrics)).metrics == {"a": 3.0, "b": 5.0}


def test_metrics_of_a_worker_have_a_limited_number_of_names():
    """Each is a line on the terminal, and a worker may write 300,000 of them."""
    most = worker_report.MAX_METRICS
    found = told(*(event("metric", name=str(number), value=number) for number in range(most + 2)))
    assert (len(found.metrics), found.ignored) == (most, 2)
    found = told(*(event("metric", name=str(number % most), value=number) for number in range(most + 2)))
    assert (found.metrics["0"], found.metrics["1"], found.ignored) == (most, most + 1, 0)
    lengths = (worker_report.MAX_METRIC_NAME, worker_report.MAX_METRIC_NAME + 1)
    assert told(*(event("metric", name="x" * length, value=1) for length in lengths)).ignored == 1


def test_modules_and_warnings_are_listed_once():
    captured = event("captured", module="net", signature="f32[1]", engine="onednn", seconds=0.5, error=0.0)
    again = {**captured, "pid": 11}
    eager = event("eager", module="net", reason="hooks")
    result = told(captured, again, eager, eager, event("warning", text="w"), event("warning", text="w"))
    assert result.captured == ({k: v for k, v in captured.items() if k not in ("event", "pid")},)
    assert result.eager == ({"module": "net", "reason": "hooks"},)
    assert result.warnings == ("w",)


LONG = [0] * (worker_report.MAX_VALUES + 1)
KEPT = ("captured", "eager", "chosen", "weights", "captures", "warning", "checksum", "live", "conditions", "degraded")


@pytest.mark.parametrize("kind", KEPT)
def test_an_event_with_more_values_than_any_is_ignored(kind):
    """Each takes two bytes of the file, and a line of the report."""
    found = told(event(kind, name="x", module="m", value=[{"x": LONG}], threads=LONG, kinds={"x": LONG}))
    assert found == WorkerReport(ignored=1)


def test_all_events_together_have_a_limited_number_of_values():
    half = LONG[: worker_report.MAX_VALUES // 2]
    count = worker_report.MAX_ALL_VALUES // len(half)
    events = [event("checksum", name=str(number), value=[{"sample": half}]) for number in range(count + 1)]
    assert told(*events).ignored == 2


def test_events_that_are_not_kept_leave_their_room_to_others():
    malformed = [event("checksum", name=name, value=[{}] * 6) for name in (None, 3, ["a"])]
    kept = event("checksum", name="a", value=[{}] * 6)
    found = read_worker_report([json.dumps(each) for each in (*malformed, kept)], max_values=10)
    assert (tuple(found.checksums), found.ignored) == (("a",), 3)


@pytest.mark.parametrize("kind", worker_report.REPLACING_EVENTS)
def test_values_that_are_replaced_do_not_count(kind):
    """A program may report a checksum in each step."""
    half = LONG[: worker_report.MAX_VALUES // 2]
    number = worker_report.MAX_ALL_VALUES // len(half) + 5
    events = [event(kind, name="x", value=[{"sample": half, "step": step}], rss_bytes=step) for step in range(number)]
    found = told(*events)
    assert found.ignored == 0
    assert str(number - 1) in str((found.checksums, found.live, found.captures, found.conditions))


@pytest.mark.parametrize("kind", KEPT)
def test_events_of_each_kind_are_limited_in_number(kind, monkeypatch):
    monkeypatch.setattr(worker_report, "MAX_ENTRIES", 3)
    facts = [{"name": name, "module": name, "text": name, "setting": name, "value": []} for name in "abcde"]
    found = told(*(event(kind, pid, **each) for pid, each in enumerate(facts, 1)))
    assert found.ignored == 2


def test_only_documented_fields_are_kept():
    nested = [[0, 0], {"a": 1}]
    events = [event(kind, module="m", reason=nested, engine=nested, x=nested) for kind in ("captured", "eager")]
    found = told(*events, event("live", rss_bytes=1, x=nested))
    assert (found.captured, found.eager) == (({"module": "m"},), ({"module": "m"},))
    assert found.live == {10: {"pid": 10, "rss_bytes": 1}}


def test_the_last_snapshot_of_each_process_counts():
    result = told(event("live", 10, rss_bytes=1), event("live", 11, rss_bytes=2), event("live", 10, rss_bytes=3))
    assert result.live == {10: {"pid": 10, "rss_bytes": 3}, 11: {"pid": 11, "rss_bytes": 2}}
    assert result.main_pid == 10


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"event": "metric", "pid": 1, "na',
        "[]",
        "3",
        '{"event": "warning"}',
        '{"event": 3, "pid": 1}',
        '{"pid": 1}',
        '{"event": "metric", "pid": 1, "name": "a", "value": "3"}',
        '{"event": "metric", "pid": 1, "name": 3, "value": 3}',
        '{"event": "metric", "pid": 1, "name": "a", "value": NaN}',
        '{"event": "metric", "pid": 1, "name": "a", "value": true}',
        '{"event": "metric", "pid": 1, "name": "a", "value": 1e999}',
        '{"event": "live", "pid": true}',
        '{"event": "live", "pid": 0}',
        '{"event": "live", "pid": -1}',
        '{"event": "live", "pid": 4194305}',
        pytest.param('{"event": "metric", "pid": 1, "name": "a", "value": 1' + "0" * 400 + "}", id="a huge integer"),
        pytest.param('{"event": "metric", "pid": 1, "name": "a", "value": 1' + "0" * 9000 + "}", id="too many digits"),
        pytest.param('{"event": "weights", "pid": 1, "kinds": ' + "[" * 100_000, id="lists in lists"),
    ],
)
def test_malformed_lines_are_counted_and_otherwise_ignored(line):
    assert read_worker_report([line]) == WorkerReport(ignored=1)


def test_empty_lines_are_not_malformed():
    assert read_worker_report(["", "\n"]) == WorkerReport()


METRIC = '{"event": "metric", "pid": 1, "name": "a", "value": %d}\n'


def test_the_first_and_the_last_events_of_a_large_file_count(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_report, "MAX_BYTES", 1000)
    events = tmp_path / "worker-0.jsonl"
    text = json.dumps(applied("graph", "on")) + "\n" + "".join(METRIC % number for number in range(10_000))
    events.write_text(text)
    report = worker_report.read_event_file(str(events))
    assert (report.settings["graph"], report.metrics, report.ignored) == (ON, {"a": 9999.0}, 0)
    assert 0 <= report.unread_bytes - (len(text) - 1000) < 2 * len(METRIC % 9999)


def test_each_worker_has_an_equal_part_of_what_is_read_of_a_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_report, "MAX_LAUNCH_BYTES", 4000)
    monkeypatch.setattr(worker_report, "MAX_LAUNCH_VALUES", 40)
    monkeypatch.setattr(worker_report, "MAX_VALUES", 6)
    events = tmp_path / "worker-0.jsonl"
    text = "".join(METRIC % number for number in range(10_000))
    events.write_text(text)
    report = worker_report.read_event_file(str(events), workers=4)
    assert report.metrics == {"a": 9999.0}
    assert 0 <= report.unread_bytes - (len(text) - 1000) < 2 * len(METRIC % 9999)
    events.write_text("".join(json.dumps(event("checksum", name=name, value=[{}] * 6)) + "\n" for name in "abc"))
    assert worker_report.read_event_file(str(events), workers=4).ignored == 2
    monkeypatch.setattr(worker_report, "MAX_LAUNCH_VALUES", 0)
    assert worker_report.read_event_file(str(events), workers=4).ignored == 2
    monkeypatch.setattr(worker_report, "MAX_PARTS_VALUES", 20)
    assert worker_report.read_event_file(str(events), workers=4).ignored == 3


@pytest.mark.parametrize("workers", [1, 4, 5, 64, 65, 256, 257, 1024, 16384])
def test_all_workers_together_have_no_more_values_than_documented(workers):
    most = (1 << 22) if workers <= 64 else (1 << 24)
    assert worker_report._values_of_one(workers) * workers <= most


def test_an_event_larger_than_any_is_ignored():
    line = json.dumps(event("warning", text="x" * worker_report.MAX_LINE))
    assert read_worker_report([line]) == WorkerReport(ignored=1)


def test_a_file_that_is_not_one_of_events_is_given_up():
    lines = ["x"] * (worker_report.MAX_MALFORMED + 1) + [METRIC % 1]
    assert read_worker_report(lines) == WorkerReport(ignored=len(lines))


def test_the_time_that_events_take_grows_with_their_number_alone():
    lines = [json.dumps(event("eager", module=f"layer{number}", reason="hooks")) for number in range(10_000)]
    few, many = (min(timed(lines[:number]) for _ in range(3)) for number in (1_250, 10_000))
    assert many < 8 * few * 4


def timed(lines):
    start = time.process_time()
    assert len(read_worker_report(lines).eager) == len(lines)
    return time.process_time() - start


values = st.sampled_from(
    [None, True, 3, 1.5, -1, 1e300, 1e308, 10**400, "", "0-1", [], ["x"], [{"cpus": "x"}], [{"cpus": 3}], {}, {"a": 1}]
)
NAMES = (
    *("pid", "setting", "detail", "reason", "name", "value", "text", "threads", "peak_memory_bytes", "frozen_bytes"),
    *("module", "signature", "mode", "speedup", "samples", "kinds", "kept", "layers", "bytes", "error_max", "seconds"),
    *("budget", "argmax_agreement"),
)
KINDS = (
    *("applied", "degraded", "captured", "eager", "metric", "warning", "live"),
    *("chosen", "weights", "accuracy", "captures"),
)
odd_events = st.builds(
    lambda kind, facts: {"event": kind, "pid": 1} | facts,
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(NAMES), values, max_size=4),
)


INFINITE = {"event": "captured", "pid": 1, "frozen_bytes": float("inf")}


@example(
    [INFINITE, {"event": "captures", "pid": 1, "seconds": 10**400}, {"event": "captures", "pid": 2, "seconds": 1.5}]
)
@example([{"event": "weights", "pid": 1, "kinds": {"int8": 10**400}}])
@example([{"event": "chosen", "pid": 1, "mode": "graph", "speedup": 10**400}])
@given(st.lists(odd_events, max_size=4))
def test_no_event_breaks_the_report(events):
    found = told(*events)
    json.dumps(report_on(found), allow_nan=False)
    assert all(isinstance(line, str) for line in worker_lines(ended(found)))


def test_the_shortest_lines_take_no_more_memory_than_the_file(tmp_path):
    size = 3 << 20
    (tmp_path / "events").write_bytes(b"ab\n" * (size // 3))
    tracemalloc.start()
    try:
        found = read_event_file(str(tmp_path / "events"))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.ignored == size // 3
    assert peak_bytes < 3 * size
