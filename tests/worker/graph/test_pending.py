"""Captures whose graphs are being tried in the helper process: what they keep alive, and what forked processes get."""

import gc
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.fusion.search import TrialOutcome  # noqa: E402
from cpulaunch.worker.fusion.trials import Trials  # noqa: E402
from cpulaunch.worker.graph import cache, eligibility, module_state  # noqa: E402
from cpulaunch.worker.graph import capture as capture_module  # noqa: E402
from cpulaunch.worker.graph.cache import Captures  # noqa: E402
from cpulaunch.worker.graph.capture import (  # noqa: E402
    MAX_PREPARED,
    Call,
    Captured,
    PendingError,
    capture,
    forget_prepared,
    prepared_bytes,
)
from cpulaunch.worker.graph.engines import captures  # noqa: E402
from cpulaunch.worker.graph.precision import Precision  # noqa: E402
from cpulaunch.worker.graph.weights import Weights  # noqa: E402

pytestmark = pytest.mark.torch


class Answers:
    """Trials with this answer; `asked` counts the questions."""

    def __init__(self) -> None:
        self.answer: TrialOutcome | None = None
        self.asked = 0

    def refusal(self, seconds: float) -> str | None:
        return None

    def outcome(self, graph: object, inputs: Sequence[Tensor], left_out: frozenset[int]) -> TrialOutcome | None:
        self.asked += 1
        return self.answer


def attempt(model: nn.Module, weights: Weights, value: Tensor, answers: Answers) -> Any:
    call = Call(module=model, args=(value,), kwargs={}, inputs=[value])
    with torch.no_grad():
        return capture(call, model(value), weights, Precision(None), answers)  # type: ignore[arg-type]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()


def test_a_pending_capture_keeps_no_arguments(model: nn.Module) -> None:
    answers, weights = Answers(), Weights(model)
    value = torch.randn(2, 3, 8, 8)
    seen = weakref.ref(value)
    with pytest.raises(PendingError):
        attempt(model, weights, value, answers)
    del value
    gc.collect()
    assert seen() is None
    answers.answer = TrialOutcome()
    other = torch.randn(2, 3, 8, 8)
    captured = attempt(model, weights, other, answers)
    torch.testing.assert_close(captured.run(Call(module=model, args=(), kwargs={}, inputs=[other])), model(other))


class WithToken(nn.Module):
    """TorchScript computes the views of its weights while it traces, as of the class token of a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x @ self.scale.t()[:, 1:] @ self.scale[1:]], 1).relu()


def test_views_of_weights_in_a_pending_graph_are_not_the_programs() -> None:
    """The capture would wait for ever: the program may change what it holds too."""
    model = WithToken().eval()
    answers, weights = Answers(), Weights(model)
    value = torch.randn(2, 3, 8)
    assert not weights.are_held_elsewhere()
    with pytest.raises(PendingError):
        attempt(model, weights, value, answers)
    assert not weights.are_held_elsewhere()
    view = model.scale.detach()[1:]
    assert weights.are_held_elsewhere()
    del view
    answers.answer = TrialOutcome()
    captured = attempt(model, weights, value, answers)
    assert not weights.are_held_elsewhere()
    torch.testing.assert_close(captured.run(Call(module=model, args=(), kwargs={}, inputs=[value])), model(value))
    forget_prepared(weights)
    del captured
    gc.collect()
    assert not weights.are_held_elsewhere()


def test_views_of_weights_in_a_graph_take_no_memory() -> None:
    """Each counted as much as its whole weight, so that few captures had room."""
    model = WithToken().eval()
    weights = Weights(model)
    with pytest.raises(PendingError):
        attempt(model, weights, torch.randn(2, 3, 8), Answers())
    assert [each.frozen.bytes for each in capture_module._prepared[weights]] == [0]
    forget_prepared(weights)


def test_pending_captures_are_counted_and_few(model: nn.Module) -> None:
    answers, weights = Answers(), Weights(model)
    gc.collect()
    before = prepared_bytes()
    for rows in range(1, MAX_PREPARED + 3):
        with pytest.raises(PendingError):
            attempt(model, weights, torch.randn(rows, 3, 4, 4), answers)
    assert prepared_bytes() > before  # Weights that are folded into others are new ones.
    assert len(capture_module._prepared[weights]) == MAX_PREPARED
    forget_prepared(weights)
    assert prepared_bytes() == before


def test_time_spent_on_captures_does_not_keep_a_prepared_one_from_being_finished(model: nn.Module, monkeypatch) -> None:
    """A shape that is not prepared waits: it would take its share of what captures have saved."""
    monkeypatch.setattr(cache, "TOLERATED_SLOWDOWN", float("inf"))
    monkeypatch.setattr(eligibility, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(eligibility, "SHARE", 0.0)
    monkeypatch.setattr(eligibility, "SMALL_SECONDS", float("inf"))
    monkeypatch.setattr(module_state, "FIRST_PAUSE", 0.0)
    answers = Answers()

    def engine(call: Call, eager: Any, weights: Weights) -> Captured:
        return capture(call, eager, weights, Precision(None), answers)  # type: ignore[arg-type]

    made = Captures(TorchSettings(graph="onednn"), engine)
    prepared, other = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 8, 8)

    def run(value: Tensor) -> int:
        with torch.no_grad():
            made.call(model, (value,), {}, lambda _: model(value), outermost=True)
        return made.usage.modules

    assert [run(prepared), run(prepared)] == [0, 0]
    assert made.usage.seconds > 0
    assert [run(other), run(other), answers.asked] == [0, 0, 1]
    answers.answer = TrialOutcome()
    assert run(prepared) == 1
    asked = answers.asked
    assert [run(other), run(other)] == [1, 1]
    assert answers.asked == asked


def test_the_outcome_of_a_trial_is_asked_for_each_second(model: nn.Module, monkeypatch) -> None:
    """A graph that is there after 30 s must not be used 8 s later than it could be."""
    monkeypatch.setattr(eligibility, "FREE_SECONDS", 0.0)
    clock = [0.0]
    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(cache, "is_too_early", lambda *given, **named: False)
    answers, value = Answers(), torch.randn(2, 3, 8, 8)

    def engine(call: Call, eager: Any, weights: Weights) -> Captured:
        return capture(call, eager, weights, Precision(None), answers)  # type: ignore[arg-type]

    made = Captures(TorchSettings(graph="onednn"), engine)

    def asked_in(seconds: int) -> int:
        before = answers.asked
        with torch.no_grad():
            for _ in range(10 * seconds):
                made.call(model, (value,), {}, lambda _: model(value), outermost=True)
                clock[0] += 0.1
        return answers.asked - before

    asked_in(10)
    assert answers.asked > 0
    assert 15 <= asked_in(20) <= 20


def test_a_call_that_is_too_long_to_be_captured_is_not_traced(model: nn.Module, monkeypatch, tmp_path: Path) -> None:
    """Its graph, which would run as long, would be refused after the trace."""
    clock, traced = [0.0], []
    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(capture_module, "trace_call", lambda *arguments, **named: traced.append(arguments))
    settings, trials = TorchSettings(graph="onednn", graph_budget=60.0), Trials(60.0, folder=str(tmp_path / "graphs"))
    made = Captures(settings, lambda *given: capture(*given, Precision(None), trials))
    value = torch.randn(2, 3, 8, 8)

    def run(seconds: float) -> Tensor:
        clock[0] += seconds
        return model(value)

    with torch.no_grad():
        for seconds in (9.0, *(3.4,) * 20):
            made.call(model, (value,), {}, lambda _, seconds=seconds: run(seconds), outermost=True)
    state = made._state(model, True)
    assert (traced, state.try_submodules) == ([], True)
    assert state._reasons == {"a call would wait 10 s for its compilation; --graph-budget gives it 10 s"}


def test_a_forked_process_captures_although_a_thread_of_its_parent_does() -> None:
    made = captures(TorchSettings(graph="onednn"), Precision(None))
    assert isinstance(made, Captures)
    with made._capture_lock:
        child = os.fork()
        if not child:
            os._exit(0 if made._capture_lock.acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
