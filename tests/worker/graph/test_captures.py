"""When calls are captured: the second call of a signature, within a budget, and only where signatures come again."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from cpulaunch.records.record import replace  # noqa: E402
from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.graph import cache, eligibility  # noqa: E402
from cpulaunch.worker.graph.cache import Captures  # noqa: E402
from cpulaunch.worker.graph.capture import Call, Captured, PendingError, best_seconds  # noqa: E402
from cpulaunch.worker.graph.module_state import FRUITLESS_KEYS  # noqa: E402
from cpulaunch.worker.graph.onednn import UnboundedError  # noqa: E402
from cpulaunch.worker.graph.trace import RefusedError  # noqa: E402

pytestmark = pytest.mark.torch


class Engine:
    """Captures calls as the module itself. `error`: raised instead; `calls`: the shapes that it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.error: Exception | None = None

    def __call__(self, call: Call, eager: Any, weights: Any) -> Captured:
        self.calls.append(tuple(call.inputs[0].shape))
        if self.error is not None:
            raise self.error
        return Captured(
            run=lambda call: call.module.forward(*call.args, **call.kwargs),
            holds=lambda call: True,
            error=0.0,
            seconds=0.1,
            bytes=100,
            low_precision=False,
        )


class Program:
    """Calls of modules by captures of an engine that does nothing; `outermost` False: as parts of other modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setattr(cache, "TOLERATED_SLOWDOWN", float("inf"))
        monkeypatch.setattr(cache, "best_seconds", lambda *runs: [1.0 for _ in runs])
        monkeypatch.setattr(eligibility, "FREE_SECONDS", float("inf"))
        monkeypatch.setattr(eligibility, "SMALL_SECONDS", float("inf"))
        self.engine = Engine()
        self.captures = Captures(TorchSettings(graph="onednn", **settings), self.engine)
        self.model = nn.Linear(4, 4).eval()
        self.prepared: list[bool] = []

    def call(self, rows: int, *, outermost: bool = True) -> Tensor:
        value, before = torch.ones(rows, 4), self.captures.own.preparations
        with torch.no_grad():
            result = self.captures.call(self.model, (value,), {}, lambda _: self.model(value), outermost=outermost)
        self.prepared.append(self.captures.own.preparations != before)
        return result

    def reasons(self) -> str:
        return "; ".join(self.captures._state(self.model, True)._reasons)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Program]:
    return lambda **settings: Program(monkeypatch, **settings)


def test_a_signature_is_captured_at_its_second_call(program) -> None:
    run = program()
    for calls, captured in ((1, 0), (2, 1), (3, 1)):
        run.call(2)
        assert len(run.engine.calls) == captured, calls
    run.call(3)
    assert run.engine.calls == [(2, 4)]


class LateLock:
    """The lock of captures, for a thread that looks for a capture just before another one makes it, and then locks."""

    def __init__(self, others_call: Callable[[], object]) -> None:
        self.others_call = others_call

    def acquire(self, *, blocking: bool) -> bool:
        self.others_call()
        return True

    def release(self) -> None:
        pass


@pytest.mark.parametrize("error", [None, RefusedError("refused"), ValueError("failed")], ids=str)
def test_what_another_thread_has_captured_meanwhile_is_not_captured_again(program, error) -> None:
    run = program()
    run.engine.error = error
    run.call(2)
    plain = run.captures._capture_lock

    def others_call() -> None:
        run.captures._capture_lock = plain
        run.call(2)

    run.captures._capture_lock = LateLock(others_call)
    torch.testing.assert_close(run.call(2), run.model(torch.ones(2, 4)))
    assert run.engine.calls == [(2, 4)]
    assert run.captures.usage.modules == (error is None)


def test_calls_that_prepare_something_are_counted(program) -> None:
    """A first call, the capture and the call that verifies it; not those that only run the graph."""
    run = program()
    for _ in range(6):
        run.call(2)
    assert run.prepared == [True, True, True, False, False, False]


class Cached(nn.Module):
    """Appends what it computes to a cache, as decoders do, or replaces what is in it, or only reads it."""

    def __init__(self, effect: str) -> None:
        super().__init__()
        self.linear, self.effect = nn.Linear(4, 4), effect

    def forward(self, value: Tensor, cache: dict[str, list[Any]]) -> Tensor:
        result = self.linear(value)
        if self.effect == "appends":
            cache["keys"].append(result)
        elif self.effect == "replaces":
            cache["keys"][0] = torch.cat([cache["keys"][0], result])
        elif self.effect == "counts":
            cache["steps"][0] += 1
        elif self.effect == "closes":
            cache["steps"][0] = object()
        return result + cache["keys"][0][:1]


@pytest.mark.parametrize(
    ("effect", "captured"), [("appends", 0), ("replaces", 0), ("counts", 0), ("closes", 0), ("reads", 1)]
)
def test_a_call_that_changes_what_an_argument_holds_is_not_traced(program, effect: str, captured: int) -> None:
    run, model = program(), Cached(effect).eval()
    with torch.no_grad():
        for _ in range(2):
            given = (torch.ones(1, 4), {"keys": [torch.ones(1, 4)], "steps": [0]})
            run.captures.call(model, given, {}, lambda _, given=given: model(*given), outermost=True)
    state = run.captures._state(model, True)
    assert (len(run.engine.calls), state.try_submodules) == (captured, not captured)
    assert state._reasons == (set() if captured else {"it changes an argument"})


class Handle:
    """Holds a tensor, which cannot be read once it is closed."""

    def __init__(self) -> None:
        self.tensor, self.closed = torch.ones(1, 4), False

    def flattened(self) -> tuple[list[Tensor], None]:
        if self.closed:
            raise RuntimeError("it is closed")
        return [self.tensor], None


class Closing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, handle: Handle) -> Tensor:
        handle.closed = True
        return self.linear(handle.tensor)


def test_an_argument_that_cannot_be_read_after_its_call_is_no_error_of_the_program(program) -> None:
    pytree.register_pytree_node(Handle, Handle.flattened, lambda children, context: Handle())
    run, model = program(), Closing().eval()
    with torch.no_grad():
        for _ in range(2):
            handle = Handle()
            result = run.captures.call(model, (handle,), {}, lambda _, handle=handle: model(handle), outermost=True)
            torch.testing.assert_close(result, model.linear(handle.tensor))
    assert run.engine.calls == []
    assert "it cannot be captured: it is closed" in run.captures._state(model, True)._reasons


def test_a_capture_is_timed_with_the_check_of_its_inputs(program, monkeypatch) -> None:
    run, checked = program(), []
    capture = run.engine.__call__

    def guarded(*arguments: Any) -> Captured:
        return replace(capture(*arguments), accepts=lambda inputs: not checked.append(len(inputs)))

    def timed(*runs: Callable[[], Any]) -> list[float]:
        for each in runs:
            each()
        return [1.0 + len(checked), 1.0]  # The check alone makes the capture slower.

    run.captures._engine = guarded
    monkeypatch.setattr(cache, "best_seconds", timed)
    monkeypatch.setattr(cache, "TOLERATED_SLOWDOWN", 1.5)
    for _ in range(4):
        run.call(2)
    assert checked == [1]
    assert "eager execution is faster" in run.reasons()


@pytest.mark.parametrize(
    ("graph", "plain", "rounds"),
    [((0.001,), (0.002,), 20), ((0.1,), (0.15,), 2), ((0.3,), (0.4,), 1), ((0.1,), (0.3,), 1), ((0.9, 0.3), (0.4,), 2)],
)
def test_a_long_call_is_timed_once_unless_its_graph_seems_slower(monkeypatch, graph, plain, rounds: int) -> None:
    clock, runs = [0.0], []

    def running(seconds: tuple[float, ...]) -> None:
        clock[0] += seconds[min(len(runs) // 2, len(seconds) - 1)]
        runs.append(seconds)

    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock[0])
    found = best_seconds(lambda: running(graph), lambda: running(plain))
    assert found == pytest.approx([min(graph), min(plain)])
    assert len(runs) == 2 * rounds


@pytest.mark.parametrize(("unbounded", "gives_up"), [(1.0, True), (0.5, True), (0.01, False)])
def test_a_module_whose_graphs_often_run_in_vain_runs_eagerly(program, unbounded: float, gives_up: bool) -> None:
    run, runs = program(), [0]
    capture = run.engine.__call__

    def bounded(*arguments: Any) -> Captured:
        found = capture(*arguments)

        def graph(call: Call) -> Tensor:
            runs[0] += 1
            if int(runs[0] * unbounded) > int((runs[0] - 1) * unbounded):
                raise UnboundedError("huge")
            result: Tensor = found.run(call)
            return result

        return replace(found, run=graph)

    run.captures._engine = bounded
    for _ in range(400):
        run.call(2)
    assert ("run twice" in run.reasons()) is gives_up
    assert (runs[0] < 30) is gives_up
    assert (run.captures.usage.bytes == 0) is gives_up


def test_a_budget_of_seconds_ends_captures(program, monkeypatch) -> None:
    run, clock = program(graph_budget=10.0), [0.0]
    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock[0])
    capture = run.engine.__call__

    def slow(*arguments: Any) -> Captured:
        clock[0] += 4.0
        if len(run.engine.calls) == 1:
            run.engine.error = RefusedError("refused")
        return capture(*arguments)

    run.captures._engine = slow
    for rows in (1, 2, 3, 4, 5) * 3:
        run.call(rows)
    assert len(run.engine.calls) == 3  # The second one failed, which counts too.
    assert run.captures.usage.seconds == 12.0
    assert "captures have taken 12 s of the 10 s that --graph-budget allows" in run.reasons()
    before = len(run.prepared)
    run.call(5)
    run.call(1)
    assert run.prepared[before:] == [False, False]


def test_further_captures_are_paid_for_by_time_and_by_what_captures_have_saved(program, monkeypatch) -> None:
    run, clock = program(), [0.0]
    monkeypatch.setattr(eligibility, "FREE_SECONDS", 4.0)
    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(cache, "best_seconds", lambda *runs: [1.0, 1.5])
    capture = run.engine.__call__

    def slow(*arguments: Any) -> Captured:
        clock[0] += 5.0
        return capture(*arguments)

    run.captures._engine = slow
    for rows in (1, 2, 3) * 4:
        run.call(rows)
    assert run.engine.calls == [(1, 4)]
    clock[0] += 240.0  # Half a per cent of 245 s is 1.2 s.
    run.call(2)
    assert len(run.engine.calls) == 2
    for _ in range(5):  # Each saves half a second.
        run.call(1)
        run.call(3)
        assert len(run.engine.calls) == 2
    for _ in range(5):
        run.call(1)
    run.call(3)
    assert len(run.engine.calls) == 3


@pytest.mark.parametrize(
    ("call_seconds", "spent", "imports", "too_early"),
    [
        (0.03, 0.03, True, False),
        (0.04, 0.25, False, True),
        (0.04, 0.27, False, False),
        (0.04, 1.25, True, True),
        (0.04, 1.27, True, False),
        (10.0, 64.0, False, True),
        (10.0, 66.0, False, False),
    ],
)
def test_a_capture_that_costs_something_needs_calls_before_it(
    call_seconds: float, spent: float, imports: bool, too_early: bool
) -> None:
    assert eligibility.is_too_early(call_seconds, spent, imports=imports) is too_early


@pytest.mark.parametrize(
    ("seconds", "outermost", "elsewhere", "captured_at"),
    [(0.03, True, 0.0, 2), (0.05, True, 0.0, 7), (2.0, True, 0.0, 7), (2.0, True, 100.0, 2), (2.0, False, 0.0, 2)],
)
def test_a_module_of_long_calls_is_captured_once_they_have_taken_half_of_what_that_costs(
    program, monkeypatch, seconds: float, outermost: bool, elsewhere: float, captured_at: int
) -> None:
    run, clock, value, calls = program(), [0.0], torch.ones(2, 4), 0
    monkeypatch.setattr(eligibility, "SMALL_SECONDS", 0.5)
    monkeypatch.setattr(eligibility, "DYNAMO_SECONDS", 0.0)
    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock[0])
    run.captures.seconds_of = lambda module: elsewhere

    def eager(_: bool) -> Tensor:
        clock[0] += seconds
        result: Tensor = run.model(value)
        return result

    with torch.no_grad():
        while not run.engine.calls and calls < 20:
            run.captures.call(run.model, (value,), {}, eager, outermost=outermost)
            calls += 1
    assert calls == captured_at
    assert run.captures.own.pending == captured_at - 2  # Meanwhile other modes have their turn.


def test_a_capture_that_is_pending_is_tried_again_and_again_more_rarely(program, monkeypatch) -> None:
    run, clock = program(), [0.0]
    monkeypatch.setattr(cache.time, "perf_counter", lambda: clock[0])
    run.engine.error = PendingError("in preparation")
    for _ in range(401):
        run.call(2)
        clock[0] += 0.01
    assert len(run.engine.calls) == 5  # At the start and after 0.25, 0.75, 1.75 and 3.75 seconds.
    assert run.captures.own.pending == 400
    assert run.reasons() == ""
    run.engine.error = None
    for _ in range(500):
        run.call(2)
        clock[0] += 0.01
    assert len(run.engine.calls) == 6
    assert run.captures.own.pending < 900
    assert run.captures.usage.bytes == 100


def test_signatures_that_never_come_again_leave_room_for_others(program) -> None:
    run = program(graph_signatures=4)
    for rows in range(10, 500):
        run.call(rows)
        run.call(1 + rows % 3)
    assert sorted(run.engine.calls) == [(1, 4), (2, 4), (3, 4)]
    assert run.reasons() == ""


def test_refused_signatures_do_not_use_up_the_limit_of_captures(program) -> None:
    run = program(graph_signatures=4)
    run.engine.error = RefusedError("refused")
    for rows in (1, 2, 3) * 2:
        run.call(rows)
    run.engine.error = None
    for rows in (4, 5, 6, 7, 8) * 3:
        run.call(rows)
    assert run.engine.calls[3:] == [(4, 4), (5, 4), (6, 4), (7, 4)]
    assert "more than 4 signatures" in run.reasons()


def test_a_part_whose_signatures_never_come_again_is_given_up(program) -> None:
    run = program()
    for rows in range(1, 100):
        run.call(rows, outermost=False)
    assert run.engine.calls == []
    assert "other arguments nearly every time" in run.reasons()
    assert run.prepared.count(True) == FRUITLESS_KEYS + 1


def test_a_part_with_a_few_signatures_is_captured(program) -> None:
    run = program(graph_signatures=20)
    for rows in (*range(1, FRUITLESS_KEYS), *range(1, FRUITLESS_KEYS), *range(1, 20)):
        run.call(rows, outermost=False)
    assert len(run.engine.calls) == FRUITLESS_KEYS - 1


def test_retired_captures_are_dropped_and_not_made_again(program) -> None:
    run = program()
    for _ in range(4):
        run.call(2)
    assert (run.captures.usage.bytes, run.captures.usage.modules) == (100, 1)
    run.captures.retire(run.model, "not worth it")
    assert (run.captures.usage.bytes, run.captures.usage.modules) == (0, 0)
    for _ in range(4):
        run.call(2)
    assert len(run.engine.calls) == 1
    assert run.captures.is_finished(run.model)
    assert not run.captures.can_capture(run.model)
    assert "not worth it" in run.reasons()


@pytest.mark.parametrize("odd", [False, True])
def test_an_error_of_the_program_has_none_of_a_capture_as_its_context(program, monkeypatch, odd: bool) -> None:
    run = program()
    for _ in range(2):
        run.call(2)
    monkeypatch.setattr(run.model, "forward", lambda value: 1 / 0)  # What the capture runs.

    def fail(_: bool) -> Tensor:
        raise ValueError("the program's own")

    with torch.no_grad(), pytest.raises(ValueError, match="own") as raised:
        run.captures.call(run.model, (iter(()) if odd else torch.ones(2, 4),), {}, fail, outermost=True)
    assert raised.value.__context__ is None
