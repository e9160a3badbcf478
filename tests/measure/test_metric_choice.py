"""Which figure is compared, and in which direction."""

import pytest

from cpulaunch.cli.measuring.own_options import metric_choice
from cpulaunch.measure.metric_choice import (
    found_choice,
    is_rate_or_time,
    less_is_better,
    of_all_workers,
    overload_text,
    requested_choice,
)
from cpulaunch.measure.samples import MetricChoice
from cpulaunch.records.errors import UsageError

LESS = (
    *("ms", "latency", "latency p99 (ms)", "seconds per step", "s/step", "ms/token", "p95", "loss", "peak memory"),
    "offered load",
)
MORE = ("samples/s", "tokens/sec", "items per second", "tokens/min", "fps", "TFLOPS", "accuracy", "score", "GB/s")


@pytest.mark.parametrize("name", LESS)
def test_times_and_losses_are_better_if_less(name):
    assert less_is_better(name)


@pytest.mark.parametrize(
    ("name", "lower", "value"),
    [
        *[("samples/s", None, 6), ("items", None, 6), ("peak memory", None, 6), ("rss (MiB)", True, 6)],
        *[("latency p95 (ms)", None, 3), ("loss", None, 3), ("accuracy", None, 3), ("s/step", None, 3)],
        *[("cost", True, 3), ("cost", None, 6), ("offered load", None, 4)],
    ],
)
def test_only_what_adds_up_is_summed_over_workers(name, lower, value):
    assert of_all_workers(name, [2.0, 4.0], lower=lower) == value


@pytest.mark.parametrize(
    ("name", "load", "depends"),
    [
        *[("latency p95 (ms)", 1.2, True), ("latency p99 (ms)", 1.0, True), ("latency p95 (ms)", 0.99, False)],
        *[("requests/s", 1.2, False), ("items/s", 1.2, False), ("latency p95 (ms)", None, False)],
    ],
)
def test_latencies_of_a_queue_that_grows_are_no_figures(name, load, depends):
    found = overload_text(name, {name: 3.0} if load is None else {name: 3.0, "offered load": load})
    assert (found is not None) is depends


@pytest.mark.parametrize("name", MORE)
def test_rates_and_unknown_metrics_are_better_if_more(name):
    assert not less_is_better(name)


def test_speed_is_told_from_quality():
    speeds = ("samples/s", "ms", "latency p99", "wall time", "p95")
    assert [is_rate_or_time(name) for name in speeds] == [True] * len(speeds)
    assert not any(is_rate_or_time(name) for name in ("accuracy", "loss", "peak memory"))


def test_the_first_metric_in_common_is_compared():
    reported = [{"warm-up ms": 3.0, "items/s": 1.0, "loss": 2.0}, {"loss": 2.0, "items/s": 1.5}]
    assert found_choice(reported, ["a", "b"], None) == MetricChoice(name="items/s", lower_is_better=False)
    assert found_choice(reported, ["a", "b"], True).lower_is_better


def test_without_metrics_the_wall_time_is_compared():
    assert found_choice([{}, {}], ["a", "b"], None) == MetricChoice(lower_is_better=True)


@pytest.mark.parametrize("reported", [[{"a": 1.0}, {"b": 1.0}], [{"a": 1.0}, {}], [{}, {"b": 1.0}]])
def test_sides_without_a_common_metric_cannot_be_compared(reported):
    with pytest.raises(UsageError, match="no metric in common") as error:
        found_choice(reported, ["python", "-O2"], None)
    assert "--wall-time" in error.value.hint


def test_a_text_with_a_group_is_a_pattern_and_any_other_a_name():
    assert requested_choice("items/s", shown_name="", lower=None).name == "items/s"
    assert requested_choice("took ([0-9.]+) ms", shown_name="took ms", lower=None) == MetricChoice(
        pattern="took ([0-9.]+) ms", lower_is_better=True
    )


@pytest.mark.parametrize(
    ("pattern", "lower"),
    [
        *[("took ([0-9.]+) s", True), (r"epoch \d+: (\d+)ms$", True), (r"step (\S+)\s*s/it", True)],
        *[(r"(\d+) sec", True), ("(?i)loss: (.*)", True), ("Elapsed: (.*)", True), ("peak: ([0-9]+) MiB", True)],
        *[("items (.*) it/s", False), ("images: (.*), 3 s", False), ("accuracy (.*) s", False)],
        *[("acc (.*) time", False), ("read (.*) MB/s", False), ("speed (.*) images per second", False)],
        ("samples/s: (.*) in", False),
    ],
)
def test_a_patterns_unit_says_what_is_better_if_its_name_does_not(pattern, lower):
    assert metric_choice({"--metric": pattern}, None) == MetricChoice(pattern=pattern, lower_is_better=lower)


@pytest.mark.parametrize("name", ["latency p99 (ms)", "rss (MiB)", "busy (%)", "speed (images / s) of all"])
def test_a_unit_in_parentheses_is_part_of_a_name(name):
    assert requested_choice(name, shown_name="x", lower=None).name == name


@pytest.mark.parametrize("text", ["(inf|[0-9]+) ms", "(.*) ms", "(5) ms", r"(\d) ms", "(x?) ms"])
def test_a_group_that_can_match_a_number_makes_a_pattern(text):
    assert requested_choice(text, shown_name="ms", lower=None) == MetricChoice(pattern=text, lower_is_better=True)


@pytest.mark.parametrize("text", ["(", "(a)(b)", "(?:a)"])
def test_a_pattern_without_its_one_group_is_an_error(text):
    with pytest.raises(UsageError):
        requested_choice(text, shown_name="x", lower=None)
