"""What a program may call: cpulaunch.metric and cpulaunch.ready, with a launch and without one."""

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
    """A process of its own that calls metric with these arguments."""
    inherited = {name: value for name, value in os.environ.items() if name != EVENTS_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", CALL, arguments], env=inherited | environ, capture_output=True, text=True, timeout=60
    )


def test_without_a_launch_nothing_happens():
    assert call("('samples/s', 3)").stdout == "done\n"


def test_a_launch_that_is_over_is_no_error(tmp_path):
    assert call("('samples/s', 3)", **{EVENTS_VARIABLE: str(tmp_path / "gone" / "worker-0.jsonl")}).stdout == "done\n"


def test_a_full_disk_is_no_error():
    assert call("('samples/s', 3)", **{EVENTS_VARIABLE: "/dev/full"}).stdout == "done\n"


def test_a_launch_gets_the_figure(tmp_path):
    file = tmp_path / "worker-0.jsonl"
    file.write_text("")
    call("(' Sätze/s ', 3)", **{EVENTS_VARIABLE: str(file)})
    event = json.loads(file.read_text())
    assert isinstance(event.pop("pid"), int)
    assert event == {"event": "metric", "name": "Sätze/s", "value": 3.0}


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\0b"])
def test_an_empty_or_broken_name_is_refused(name):
    with pytest.raises(ValueError, match="one line of text"):
        cpulaunch.metric(name, 1)


@pytest.mark.parametrize("name", [None, 3, b"samples/s"])
def test_a_name_is_a_text(name):
    with pytest.raises(TypeError, match="a metric's name is a text"):
        cpulaunch.metric(name, 1)


@pytest.mark.parametrize("value", ["3", None, [3], 3j, True, b"3"])
def test_a_value_is_a_number(value):
    with pytest.raises(TypeError, match="a metric's value is a number"):
        cpulaunch.metric("samples/s", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_a_value_is_finite(value):
    with pytest.raises(ValueError, match=r"value is a"):
        cpulaunch.metric("samples/s", value)


@pytest.mark.torch
def test_a_tensor_with_one_number_is_a_number():
    import torch

    cpulaunch.metric("loss", torch.tensor(0.5))
    with pytest.raises(ValueError, match="a metric's value is a number"):
        cpulaunch.metric("loss", torch.zeros(2))


def test_a_loop_of_figures_fills_no_disk():
    now = [100.0]
    figures = MetricQueue(lambda: now[0])
    told = [figures.take("x", step) for step in range(MetricQueue.FREE)]
    assert told == [{"x": step} for step in range(MetricQueue.FREE)]
    assert figures.take("x", 5001) == {}
    assert figures.take("y", 1) == {}
    now[0] += MetricQueue.PAUSE_SECONDS
    assert figures.take("x", 5002) == {"x": 5002, "y": 1}
    assert figures.take("x", 5003) == {}
    assert figures.rest() == {"x": 5003}
    assert figures.rest() == {}


LOOP = """
import cpulaunch, os
for step in range(5000):
    cpulaunch.metric("x", step)
if os.fork() == 0:
    raise SystemExit(0)  # Must not report_event what the parent still has to.
os.wait()
cpulaunch.metric("x", 7)
"""


def test_the_last_figure_of_a_loop_is_told(tmp_path):
    file = tmp_path / "worker-0.jsonl"
    file.write_text("")
    subprocess.run([sys.executable, "-c", LOOP], env={**os.environ, EVENTS_VARIABLE: str(file)}, check=True, timeout=60)
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert told[-1]["value"] == 7
    assert len({event["pid"] for event in told}) == 1
    assert len(told) < 2000


HEAVY = ("json", "typing", "re", "torch", "cpulaunch.launch", "cpulaunch.records.settings")


def test_a_call_without_a_launch_imports_next_to_nothing():
    code = f"import cpulaunch, sys; cpulaunch.metric('a', 1); print(*(m for m in {HEAVY} if m in sys.modules))"
    root = os.path.dirname(os.path.dirname(cpulaunch.__file__))
    start = f"import sys; sys.path.insert(0, {root!r}); {code}"
    out = subprocess.run([sys.executable, "-I", "-S", "-c", start], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []
