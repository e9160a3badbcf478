"""The wrapper of module calls, installed in this process for one test, and the events it reports."""

import atexit
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.records.torch_settings import EVENTS_VARIABLE, TorchSettings
from cpulaunch.worker.features import module_calls as calls
from cpulaunch.worker.fusion.trials import Trials
from cpulaunch.worker.graph import cache as modules
from cpulaunch.worker.graph import eligibility, engines
from cpulaunch.worker.ledger import presence

PLAIN_CALL: Any = nn.Module.__call__


class Net(nn.Module):
    """Two layers, of which tests override what a call looks at, and by what it multiplies their result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.look(value)
        result: Tensor = self.layers(value)
        return result * self.factor(value)

    def look(self, value: Tensor) -> None:
        return None

    def factor(self, value: Tensor) -> float:
        return 1.0


class Plugin:
    """The events reported during a test; `eager` calls a function without the wrapper."""

    def __init__(self, events: Path) -> None:
        self._events = events

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._events.read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]

    def captured(self) -> list[str]:
        return [event["module"] for event in self.events("captured")]

    def reasons(self) -> str:
        return "; ".join(event["reason"] for event in self.events("eager"))

    @staticmethod
    def eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with plain_calls():
            return function(*args, **kwargs)


@contextmanager
def plain_calls() -> Iterator[None]:
    wrapped, nn.Module.__call__ = nn.Module.__call__, PLAIN_CALL
    try:
        yield
    finally:
        nn.Module.__call__ = wrapped


@cache
def _trials() -> Trials:
    """One helper process for all tests of this process, which wait for its answers."""
    folder = tempfile.TemporaryDirectory()
    trials = Trials(300.0, folder=folder.name, wait=True)
    atexit.register(folder.cleanup)
    atexit.register(trials.close)
    return trials


@contextmanager
def installed(folder: Path, settings: TorchSettings, *, measured: bool = False) -> Iterator[Plugin]:
    """The plugin with these settings; unless `measured`, calls run in the mode that is expected to be the fastest."""
    events = folder / "events.jsonl"
    events.touch()
    before = os.environ.get(EVENTS_VARIABLE)
    os.environ[EVENTS_VARIABLE] = str(events)
    tolerated, modules.TOLERATED_SLOWDOWN = modules.TOLERATED_SLOWDOWN, float("inf")  # Modules of tests are tiny.
    plain_trials, engines.Trials = engines.Trials, lambda seconds: _trials()
    free, eligibility.FREE_SECONDS = eligibility.FREE_SECONDS, float("inf")
    small, eligibility.SMALL_SECONDS = eligibility.SMALL_SECONDS, float("inf")  # A first call may take any time.
    absences, presence.MAX_ABSENCES = presence.MAX_ABSENCES, 0  # The wrapper could come back after the test.
    calls.install(settings, measured=measured)
    try:
        with torch.no_grad():
            yield Plugin(events)
    finally:
        nn.Module.__call__ = PLAIN_CALL
        modules.TOLERATED_SLOWDOWN = tolerated
        engines.Trials = plain_trials
        eligibility.FREE_SECONDS = free
        eligibility.SMALL_SECONDS = small
        presence.MAX_ABSENCES = absences
        os.environ.pop(EVENTS_VARIABLE)
        if before is not None:
            os.environ[EVENTS_VARIABLE] = before


def python_calls(function: Callable[[], object]) -> int:
    """The number of Python functions called."""
    count = [0]

    def profile(frame: object, event: str, argument: object) -> None:
        count[0] += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count[0]


def close(one: Any, other: Any, *, tolerance: float = 1e-4) -> None:
    """Raises: AssertionError unless two results have the same types, structure and values."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            close(one[key], other[key], tolerance=tolerance)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            close(a, b, tolerance=tolerance)
    elif hasattr(one, "__dict__"):
        close(vars(one), vars(other), tolerance=tolerance)
    else:
        assert one == other
