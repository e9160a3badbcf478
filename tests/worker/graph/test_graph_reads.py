"""What a call checks, asks and reads besides its arguments and weights: a captured call must not lose it.

PYTEST_DONT_REWRITE: Dynamo would not know the assertions of modules.
"""

import os
import re
import threading
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cpulaunch.worker.graph import module_state, trace  # noqa: E402
from cpulaunch.worker.graph.dynamo import Answer  # noqa: E402
from cpulaunch.worker.tensors.mutation import others_may_draw  # noqa: E402
from tests.launch.launching import eventually  # noqa: E402
from tests.worker.capturing import Net, Plugin, close  # noqa: E402

pytestmark = pytest.mark.torch
WRITTEN: list[str] = []
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


@torch.library.custom_op("cpulaunch_tests::write", mutates_args=())
def write(value: Tensor) -> None:
    WRITTEN.append("called")


@write.register_fake
def _(value: Tensor) -> None:
    return None


@torch.library.custom_op("cpulaunch_tests::note", mutates_args=())
def note(value: Tensor) -> Tensor:
    WRITTEN.append("called")
    return value.clone()


@note.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


class Asserting(Net):
    def look(self, value: Tensor) -> None:
        assert (value.abs() < 100).all(), "too large"


class AssertingNumber(Net):
    def look(self, value: Tensor) -> None:
        assert value.sum().item() < 100, "too large"


class AssertingAsync(Net):
    def look(self, value: Tensor) -> None:
        torch._assert_async((value.abs() < 100).all())


class AssertingTensor(Net):
    """It asserts twice about one tensor, which it writes to behind that."""

    def look(self, value: Tensor) -> None:
        fits = torch.stack([(value > -2000).all(), (value < 100).all()])
        assert fits[0], "too small"
        fits[0] = fits[1]
        assert fits[0], "too large"
        fits.fill_(True)


class AssertingLengths(Net):
    def look(self, value: Tensor) -> None:
        lengths = (value > 500).sum(dim=1).to(torch.int8)
        assert lengths.max() < 300 - 286, "too long"


class AssertingFlag(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.ones((), dtype=torch.bool))

    def look(self, value: Tensor) -> None:
        assert self.flag, "off"
        assert value.max() < 100, "too large"


class AssertingReal(Net):
    """Of real numbers, which Dynamo takes them for, these assertions would always hold."""

    def look(self, value: Tensor) -> None:
        number = (value * 1e36).sum().item()
        assert number == number, "NaN"
        assert number - number == 0, "infinite"


class Inverting(Net):
    """It fails where it divides by zero, although nothing depends on that."""

    def look(self, value: Tensor) -> None:
        count = (value < 500).sum().item()
        assert count // count == 1


class BranchingForNan(Net):
    def forward(self, value: Tensor) -> Tensor:
        number = (value * 1e36).sum().item()
        result: Tensor = self.layers(value) if number - number == 0 else value - 1
        return result


@torch.compiler.allow_in_graph
def limited(value: Tensor) -> Tensor:
    torch._assert_async((value.abs() < 100).all())
    return value * 1


@getattr(torch._dynamo, "nonstrict_trace", torch.compiler.allow_in_graph)  # Not in torch 2.5.
def limited_too(value: Tensor) -> Tensor:
    torch._assert_async((value.abs() < 100).all())
    return value * 1


class AssertingInside(Net):
    """In a function that Dynamo does not look into."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(limited(value))


class AssertingInsideToo(Net):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(limited_too(value))


class NotCompiling(Net):
    def look(self, value: Tensor) -> None:
        if not torch.compiler.is_compiling() and value.abs().max() > 100:
            raise AssertionError("too large")


class AssertingInCheckpoint(Asserting):
    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, value, use_reentrant=False)
        return result


CHECKED_BY_GRAPHS = [Asserting, AssertingAsync, AssertingTensor, AssertingLengths, AssertingFlag]
READING = [AssertingNumber, AssertingReal, Inverting]


@pytest.mark.parametrize(
    "kind",
    [*CHECKED_BY_GRAPHS, *READING, AssertingInside, AssertingInsideToo, AssertingInCheckpoint, NotCompiling],
    ids=lambda kind: kind.__name__,
)
def test_what_a_call_checks_is_checked_at_each_call(plugin: Plugin, kind: type[Net]) -> None:
    model, value = kind().eval(), torch.randn(4, 16)
    for _ in range(5):
        close(model(value), plugin.eager(model, value))
    with pytest.raises((AssertionError, RuntimeError, ZeroDivisionError)) as expected:
        plugin.eager(model, value + 1000)
    for _ in range(2):
        with pytest.raises(expected.type, match=re.escape(str(expected.value))):
            model(value + 1000)
    whole = kind.__name__ if kind in CHECKED_BY_GRAPHS else "Sequential"  # Its layers, which check nothing.
    assert plugin.captured() == [whole]
    close(model(value), plugin.eager(model, value))


def test_an_assertion_about_a_buffer_is_checked_at_each_call(plugin: Plugin) -> None:
    model, value = AssertingFlag().eval(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["AssertingFlag"]
    model.flag.fill_(False)
    for _ in range(3):
        with pytest.raises(AssertionError, match="off"):
            model(value)


def test_a_number_read_out_of_an_argument_is_read_at_each_call(plugin: Plugin) -> None:
    class AssertingArgument(Net):
        def forward(self, value: Tensor, least: Tensor) -> Tensor:
            assert least.item() >= 2**53 + 1, "too small"
            return super().forward(value)

    model, value = AssertingArgument().eval(), torch.randn(4, 16)
    for _ in range(4):
        model(value, torch.tensor(2.0**60, dtype=torch.float64))
    with pytest.raises(AssertionError, match="too small"):
        model(value, torch.tensor(2.0**53, dtype=torch.float64))


def test_a_branch_for_values_that_are_not_finite_is_taken(plugin: Plugin) -> None:
    model, value = BranchingForNan().eval(), torch.randn(4, 16)
    for each in (value, value, value, value + 1000, value):
        close(model(each), plugin.eager(model, each))
    assert plugin.captured() == ["Sequential"]
    # Older versions of Dynamo take no `item()` at all.
    assert re.search(r"reads numbers out of tensors|Tensor\.item|data-dependent", plugin.reasons())


@pytest.mark.parametrize(("kept", "other"), [(1.0, 2.0), ("a", "b"), (None, 3)])
def test_values_of_closures_that_a_call_only_returns_are_read_at_each_call(plugin: Plugin, kept, other) -> None:
    class Keeping(Net):
        def forward(self, value: Tensor) -> dict[str, object]:
            return {"value": super().forward(value), "kept": kept}

    model, value = Keeping().eval(), torch.randn(4, 16)
    for _ in range(4):
        assert model(value)["kept"] == kept
    assert plugin.captured() == ["Keeping"]
    kept = other
    assert model(value)["kept"] == other


def test_a_program_whose_assertions_often_fail_runs_eagerly(plugin: Plugin) -> None:
    model, value = Asserting().eval(), torch.randn(4, 16)
    for _ in range(5):
        model(value)
    assert plugin.captured() == ["Asserting"]
    for _ in range(12):
        with pytest.raises(AssertionError, match="too large"):
            model(value + 1000)
    assert "what it asserts about values does not hold" in plugin.reasons()


class Counting(Net):
    def look(self, value: Tensor) -> None:
        if not torch.compiler.is_compiling():
            self.calls += 1


class Writing(Net):
    def look(self, value: Tensor) -> None:
        torch.ops.cpulaunch_tests.write(value)


def test_a_call_that_does_more_where_nothing_is_compiled_does_so_each_time(plugin: Plugin) -> None:
    model, value = Counting().eval(), torch.randn(4, 16)
    for _ in range(6):
        model(value)
    assert model.calls == 6


class Noting(Net):
    def look(self, value: Tensor) -> None:
        torch.ops.cpulaunch_tests.note(value)


@pytest.mark.parametrize("kind", [Writing, Noting])
def test_an_operator_of_which_nothing_is_used_is_called_each_time(plugin: Plugin, kind: type[Net]) -> None:
    model, value = kind().eval(), torch.randn(4, 16)
    WRITTEN.clear()
    for _ in range(6):
        model(value)
    assert len(WRITTEN) == 6


class Asking(Net):
    """It asks whether torch compiles, and computes the same."""

    def factor(self, value: Tensor) -> float:
        return 2.0 if torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling() else 1.0


def test_a_call_that_only_asks_is_captured_as_its_eager_calls_compute(plugin: Plugin) -> None:
    model, value = Asking().eval(), torch.randn(4, 16)
    for _ in range(4):
        close(model(value), plugin.eager(model, value))
    assert plugin.captured() == ["Asking"]


NAMED_OTHERWISE = os.environ


class Environment(Net):
    def factor(self, value: Tensor) -> float:
        return float(os.environ.get("CPULAUNCH_TESTS_FACTOR", "1"))


class Getenv(Net):
    def factor(self, value: Tensor) -> float:
        return float(os.getenv("CPULAUNCH_TESTS_FACTOR", "1"))


class Alias(Net):
    def factor(self, value: Tensor) -> float:
        return 3.0 if "CPULAUNCH_TESTS_FACTOR" in NAMED_OTHERWISE else 1.0


@pytest.mark.parametrize("kind", [Environment, Getenv, Alias])
def test_variables_of_the_environment_are_read_at_each_call(plugin: Plugin, monkeypatch, kind: type[Net]) -> None:
    model, value = kind().eval(), torch.randn(4, 16)
    for _ in range(5):
        model(value)
    monkeypatch.setenv("CPULAUNCH_TESTS_FACTOR", "3")
    for _ in range(2):
        close(model(value), plugin.eager(model, value))
    # The guards of torch 2.5 contain the values of variables: each value is a capture.
    assert {*plugin.captured()} == ({kind.__name__} if VERSION < (2, 6) else {"Sequential"})


class Base(Net):
    def factor(self, value: Tensor) -> float:
        return 1.0 if value._base is None else 3.0


def test_a_view_as_argument_is_seen_as_one(plugin: Plugin) -> None:
    model, value = Base().eval(), torch.randn(4, 16)
    for _ in range(5):
        model(value)
    close(model(value[:]), plugin.eager(model, value[:]))


class Distributed(Net):
    def factor(self, value: Tensor) -> float:
        return 3.0 if torch.distributed.is_initialized() else 1.0


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_process_group_that_is_made_later_is_noticed(plugin: Plugin, tmp_path: Path) -> None:
    model, value = Distributed().eval(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Distributed"]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        close(model(value), plugin.eager(model, value))
    finally:
        torch.distributed.destroy_process_group()


class Ranks(Net):
    def factor(self, value: Tensor) -> float:
        there = torch.distributed.is_initialized()
        return 3.0 + torch.distributed.get_rank() + torch.distributed.get_world_size() if there else 1.0


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_process_group_that_is_gone_is_noticed(plugin: Plugin, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model, value = Ranks().eval(), torch.randn(4, 16)
    try:
        for _ in range(4):
            model(value)
    finally:
        torch.distributed.destroy_process_group()
    close(model(value), plugin.eager(model, value))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_answers_of_a_process_group_that_is_gone_do_not_hold() -> None:
    assert not Answer(function=torch.distributed.get_rank, value=0).holds()


def test_a_capture_leaves_no_mark_on_parameters(plugin: Plugin) -> None:
    model, value = Net().eval(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Net"]
    assert [vars(parameter) for parameter in model.parameters()] == [{}] * 4


class Refused(Net):
    def look(self, value: Tensor) -> None:
        self.calls += 1


def test_parameters_of_a_module_that_is_refused_can_be_swapped(plugin: Plugin) -> None:
    model, value = Refused().eval(), torch.randn(4, 16)
    model.layers = nn.Linear(16, 16)
    for _ in range(4):
        model(value)
    assert "it changes attributes of the module" in plugin.reasons()
    for parameter in list(model.parameters()):
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().double()))


class CountedCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.layers = 0, nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.layers(value)
        return result


def test_parameters_of_captured_parts_can_be_swapped(plugin: Plugin) -> None:
    model, value = CountedCalls().eval(), torch.randn(4, 16)
    for _ in range(6):
        model(value)
    assert plugin.captured() == ["Sequential"]
    for parameter in list(model.parameters()):
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().double()))


class Warning_(Net):  # noqa: N801
    def look(self, value: Tensor) -> None:
        warnings.warn("give it as float", stacklevel=1)


@pytest.mark.parametrize("kind", [Net, Warning_])
def test_a_warning_that_was_given_is_not_repeated_after_a_capture(plugin: Plugin, kind: type[Net]) -> None:
    model, value = kind().eval(), torch.randn(4, 16)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("default")
        for _ in range(5):
            model(value)
            warnings.warn("this is deprecated", stacklevel=1)
    ours = [each for each in given if each.filename == __file__]
    assert len(ours) == 1 + (kind is Warning_), [str(each.message) for each in ours]


def test_random_numbers_that_another_thread_draws_are_not_repeated(plugin: Plugin, monkeypatch) -> None:
    monkeypatch.setattr(module_state, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(module_state, "MAX_DRAWS", float("inf"))  # On a busy machine many calls see a number drawn.
    model, value, drawn, ended = Net().eval(), torch.randn(4, 16), [], threading.Event()

    def draw() -> None:
        while not ended.wait(0.05):
            drawn.append(tuple(torch.rand(4).tolist()))

    def is_captured() -> bool:
        model(value)
        return bool(plugin.captured() and drawn)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        eventually(is_captured, "a capture")
    finally:
        ended.set()
        thread.join()
    assert plugin.captured() == ["Net"]
    assert len(set(drawn)) == len(drawn)


def test_random_numbers_of_a_thread_that_ends_during_a_capture_are_not_repeated(plugin: Plugin, monkeypatch) -> None:
    model, value, drawn, is_time = Net().eval(), torch.randn(4, 16), [], threading.Event()
    plain = trace.lost_effect

    def draw() -> None:
        is_time.wait()
        drawn.extend(torch.rand(4).tolist())

    def end(graph: torch.fx.GraphModule) -> str:
        is_time.set()
        thread.join()
        return plain(graph)

    thread = threading.Thread(target=draw)
    thread.start()
    monkeypatch.setattr(trace, "lost_effect", end)
    try:
        for _ in range(3):
            model(value)
    finally:
        is_time.set()
        thread.join()
    assert plugin.captured() == ["Net"]
    assert torch.rand(4).tolist() != drawn


class Drawing(Net):
    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.layers(value) + torch.rand(4, 16)
        return result


def test_parts_of_a_module_that_draws_are_captured_beside_other_threads(plugin: Plugin, monkeypatch) -> None:
    monkeypatch.setattr(module_state, "FIRST_PAUSE", 0.0)
    model, value, ended = Drawing().eval(), torch.randn(4, 16), threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        for _ in range(10):
            model(value)
    finally:
        ended.set()
        thread.join()
    assert plugin.captured() == ["Sequential"]


def test_threads_that_draw_nothing_hinder_no_capture(monkeypatch) -> None:
    ended = threading.Event()
    kinds = [type("TMonitor", (threading.Thread,), {}), threading.Thread]
    threads = [kind(target=ended.wait, name=name) for kind, name in zip(kinds, ("any", "ccl"), strict=True)]
    other = threading.Thread(target=ended.wait)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), *threads])
    assert not others_may_draw()
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), *threads, other])
    assert others_may_draw()


class InInferenceMode(Net):
    @torch.inference_mode()
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value)


def test_results_are_of_inference_mode_as_eager_ones_are(plugin: Plugin) -> None:
    model, value = InInferenceMode().eval(), torch.randn(4, 16)
    assert [model(value).is_inference() for _ in range(5)] == [True] * 5
