"""What a call checks, asks and reads besides its arguments and weights: a captured call must not lose it.

PYTEST_DONT_REWRITE: Dynamo would not know the assertions of modules.
"""

import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.graph import module_state  # noqa: E402
from tests.worker.capturing import Plugin, close, installed  # noqa: E402

pytestmark = pytest.mark.torch
WRITTEN: list[str] = []


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Plugin]:
    torch.manual_seed(0)
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        yield plugin


@torch.library.custom_op("cpulaunch_tests::write", mutates_args=())
def write(value: Tensor) -> None:
    WRITTEN.append("called")


@write.register_fake
def _(value: Tensor) -> None:
    return None


class Net(nn.Module):
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


class Asserting(Net):
    def look(self, value: Tensor) -> None:
        assert (value.abs() < 100).all(), "too large"


class AssertingNumber(Net):
    def look(self, value: Tensor) -> None:
        assert value.sum().item() < 100, "too large"


class AssertingAsync(Net):
    def look(self, value: Tensor) -> None:
        torch._assert_async((value.abs() < 100).all())


class NotCompiling(Net):
    def look(self, value: Tensor) -> None:
        if not torch.compiler.is_compiling() and value.abs().max() > 100:
            raise AssertionError("too large")


@pytest.mark.parametrize("kind", [Asserting, AssertingNumber, AssertingAsync, NotCompiling])
def test_what_a_call_checks_is_checked_at_each_call(plugin: Plugin, kind: type[Net]) -> None:
    model, value = kind().eval(), torch.randn(4, 16)
    for _ in range(5):
        close(model(value), plugin.eager(model, value))
    for _ in range(2):
        with pytest.raises((AssertionError, RuntimeError)):
            model(value + 1000)
    assert plugin.captured() == ["Sequential"]  # Its layers, which check nothing.


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


def test_an_operator_that_returns_nothing_is_called_each_time(plugin: Plugin) -> None:
    model, value = Writing().eval(), torch.randn(4, 16)
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
    assert plugin.captured() == ["Sequential"]


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
    model, value, drawn, ended = Net().eval(), torch.randn(4, 16), [], threading.Event()

    def draw() -> None:
        while not ended.wait(0.002):
            drawn.append(tuple(torch.rand(4).tolist()))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(100):
            if not plugin.captured():
                model(value)
    finally:
        ended.set()
        thread.join()
    assert plugin.captured() == ["Net"]
    assert len(set(drawn)) == len(drawn) > 0


class InInferenceMode(Net):
    @torch.inference_mode()
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value)


def test_results_are_of_inference_mode_as_eager_ones_are(plugin: Plugin) -> None:
    model, value = InInferenceMode().eval(), torch.randn(4, 16)
    assert [model(value).is_inference() for _ in range(5)] == [True] * 5
