"""The functions a program may call, cpulaunch.metric and cpulaunch.ready, with and without a launch."""

import json
import math
import os
import subprocess
import sys

import pytest

import cpulaunch
from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.worker.reporting.events import MetricQueue

CALL = "import cpulaunch, sys; cpulaunch.metric(*eval(sys.argv[1])); cpulaunch.ready(); print('done')"


def call(arguments, **environ):
    """A finished process that called metric with these arguments."""
    inherited = {name: value for name, value in os.environ.items() if name != EVENTS_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", CALL, arguments], env=inherited | environ, capture_output=True, text=True, timeout=60
    )


def test_without_a_launch_nothing_happens():
    assert call("('samples/s', 3)").stdout == "done\n"


def test_a_launch_that_has_ended_is_no_error(tmp_path):
    file = tmp_path / "removed" / "worker-0.jsonl"
    assert call("('samples/s', 3)", **{EVENTS_VARIABLE: str(file)}).stdout == "done\n"


def test_a_full_disk_is_no_error():
    assert call("('samples/s', 3)", **{EVENTS_VARIABLE: "/dev/full"}).stdout == "done\n"


def test_a_metric_is_reported_to_the_launch(tmp_path):
    file = tmp_path / "worker-0.jsonl"
    file.write_text("")
    call("(' Sätze/s ', 3)", **{EVENTS_VARIABLE: str(file)})
    event = json.loads(file.read_text())
    assert isinstance(event.pop("pid"), int)
    assert event == {"event": "metric", "name": "Sätze/s", "value": 3.0}


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\0b"])
def test_an_empty_or_broken_name_is_refused(name):
    with pytest.raises(ValueError, match="must be a single printable line"):
        cpulaunch.metric(name, 1)


@pytest.mark.parametrize("name", [None, 3, b"samples/s"])
def test_a_name_must_be_a_string(name):
    with pytest.raises(TypeError, match="the name of a metric must be a string"):
        cpulaunch.metric(name, 1)


@pytest.mark.parametrize("value", ["3", None, [3], 3j, True, b"3"])
def test_a_value_must_be_a_number(value):
    with pytest.raises(TypeError, match="the value of a metric must be a number"):
        cpulaunch.metric("samples/s", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_a_value_must_be_finite(value):
    with pytest.raises(ValueError, match="the value of a metric must be"):
        cpulaunch.metric("samples/s", value)


@pytest.mark.torch
def test_a_tensor_with_one_number_is_a_number():
    import torch

    cpulaunch.metric("loss", torch.tensor(0.5))
    with pytest.raises(ValueError, match="the value of a metric must be a number"):
        cpulaunch.metric("loss", torch.zeros(2))


def test_metrics_of_a_long_loop_are_reported_once_a_second():
    now = [100.0]
    queue = MetricQueue(lambda: now[0])
    reported = [queue.take("x", step) for step in range(MetricQueue.FREE)]
    assert reported == [{"x": step} for step in range(MetricQueue.FREE)]
    assert queue.take("x", 5001) == {}
    assert queue.take("y", 1) == {}
    now[0] += MetricQueue.PAUSE_SECONDS
    assert queue.take("x", 5002) == {"x": 5002, "y": 1}
    assert queue.take("x", 5003) == {}
    assert queue.rest() == {"x": 5003}
    assert queue.rest() == {}


LOOP = """
import cpulaunch, os
for step in range(5000):
    cpulaunch.metric("x", step)
if os.fork() == 0:
    raise SystemExit(0)  # Must not report the metrics that its parent has not reported yet.
os.wait()
cpulaunch.metric("x", 7)
"""


def test_the_last_metric_of_a_loop_is_reported(tmp_path):
    file = tmp_path / "worker-0.jsonl"
    file.write_text("")
    subprocess.run([sys.executable, "-c", LOOP], env={**os.environ, EVENTS_VARIABLE: str(file)}, check=True, timeout=60)
    reported = [json.loads(line) for line in file.read_text().splitlines()]
    assert reported[-1]["value"] == 7
    assert len({event["pid"] for event in reported}) == 1
    assert len(reported) < 2000


HEAVY = ("json", "typing", "re", "torch", "cpulaunch.launch", "cpulaunch.records.settings")


def test_a_call_without_a_launch_imports_no_large_module():
    code = f"import cpulaunch, sys; cpulaunch.metric('a', 1); print(*(m for m in {HEAVY} if m in sys.modules))"
    root = os.path.dirname(os.path.dirname(cpulaunch.__file__))
    start = f"import sys; sys.path.insert(0, {root!r}); {code}"
    out = subprocess.run([sys.executable, "-I", "-S", "-c", start], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []
