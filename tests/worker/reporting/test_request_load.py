"""The open-loop load: when requests arrive, what counts as a latency, and what is reported."""

import json
import statistics
import subprocess
import sys

import pytest

from cpulaunch.records.torch_settings import EVENTS_VARIABLE, OFFERED_LOAD, RATE_VARIABLE
from cpulaunch.worker.reporting import requests
from cpulaunch.worker.reporting.requests import arrival_times, offered_load, percentile, serve


class Machine:
    """A clock that only sleeping and serving move."""

    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def served(monkeypatch):
    """A function that serves requests of so many seconds each, and returns the metrics."""
    reported = {}
    monkeypatch.setattr(requests, "report_metric", reported.__setitem__)

    def run(seconds, *, rate=10.0, count=200, warm_up=3):
        machine, seen = Machine(), []
        for number in serve(rate, count, warm_up, clock=machine.clock, sleep=machine.sleep):
            seen.append(number)
            machine.now += seconds
        assert seen == list(range(count + warm_up))
        return reported

    return run


def test_arrivals_are_random_and_the_same_in_every_run():
    times = arrival_times(50.0, 5000)
    assert times == arrival_times(50.0, 5000)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.05), "as of a Poisson process"


def test_a_server_that_keeps_up_has_the_latency_of_its_work(served):
    found = served(0.0001)
    assert found["latency p50 (ms)"] == pytest.approx(0.1, rel=0.01)
    assert found["requests/s"] == pytest.approx(10, rel=0.2)


def test_waiting_in_the_queue_counts(served):
    busy = dict(served(0.08))
    assert busy["latency p50 (ms)"] > 1.2 * 80
    overloaded = served(0.2)
    assert overloaded["latency p99 (ms)"] > 10 * busy["latency p99 (ms)"]
    assert overloaded["requests/s"] == pytest.approx(5, rel=0.02), "it serves what it can"


@pytest.mark.parametrize(("seconds", "load"), [(0.05, 0.5), (0.09, 0.9), (0.12, 1.2), (0.3, 3.0)])
def test_a_queue_that_grows_is_told_from_one_that_does_not(served, seconds, load):
    assert served(seconds, count=2000)[OFFERED_LOAD] == pytest.approx(load, rel=0.1)


def test_the_load_is_that_of_what_was_served(served):
    assert offered_load([1.0, 2.0, 3.0, 9.0], [0.5, 0.7, 100.0]) == pytest.approx(0.6)
    assert OFFERED_LOAD not in served(5.0, count=1), "nothing waits for a single request"
    assert served(5.0, count=5, rate=1e308)[OFFERED_LOAD] > 1e9


def test_percentiles_are_values_that_were_seen():
    values = [float(each) for each in range(1, 101)]
    assert [percentile(values, each) for each in (50, 95, 99)] == [50, 95, 99]
    assert percentile([7.0], 99) == 7


@pytest.mark.parametrize(("rate", "count"), [(0, 5), (float("nan"), 5), (float("inf"), 5), (5, 0), (5, -1)])
def test_impossible_loads_are_refused(rate, count):
    with pytest.raises(ValueError, match="requests"):
        list(serve(rate, count, 0, clock=Machine().clock, sleep=Machine().sleep))


def test_a_loop_that_ends_early_reports_what_was_served(tmp_path):
    events = tmp_path / "events.jsonl"
    events.touch()
    code = "import cpulaunch\nfor n in cpulaunch.requests(1, 50, warm_up=0):\n  if n == 9: break"
    environ = {EVENTS_VARIABLE: str(events), RATE_VARIABLE: "1000"}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=60, cwd=".")
    found = {each["name"]: each["value"] for each in map(json.loads, events.read_text().splitlines())}
    assert list(found) == ["latency p50 (ms)", "latency p95 (ms)", "latency p99 (ms)", "requests/s", OFFERED_LOAD]
    assert found["requests/s"] > 100, "at the rate of the variable"
