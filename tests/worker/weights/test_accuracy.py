"""The figures of what a lower precision changed, and that measuring them changes nothing."""

import copy
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.weights.accuracy import MEASURED_CALLS, Accuracy, difference  # noqa: E402
from tests.worker.capturing import installed  # noqa: E402

pytestmark = pytest.mark.torch

WIDTH = 256


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = tmp_path / "events"
    path.touch()
    monkeypatch.setenv("CPULAUNCH_EVENTS", str(path))
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


def test_differences_are_relative_to_the_expected_rms() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    found = difference(expected, expected + torch.tensor([[0.0, 0.0], [6.0, 0.0]]))
    assert found is not None
    rms = (50 / 4) ** 0.5
    assert found.largest == pytest.approx(6 / rms)
    assert found.rms == pytest.approx(3 / rms)
    assert found.argmax_agreement == 0.5


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)),
        (torch.ones(2), torch.ones(3)),
        (object(), object()),
        (torch.tensor([float("nan")]), torch.tensor([1.0])),
        (None, None),
        (torch.nested.nested_tensor([torch.ones(2)]), torch.nested.nested_tensor([torch.ones(2)])),
    ],
)
def test_nothing_comparable_gives_no_figure(expected: Any, got: Any) -> None:
    assert difference(expected, got) is None


def test_modules_without_packed_weights_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes milliseconds for large ones, at every call."""
    asked: list[nn.Module] = []
    monkeypatch.setattr(Accuracy, "is_due", lambda self, module: asked.append(module))
    with installed(tmp_path, TorchSettings(precision="bf16")):
        for model, value in (
            (nn.Conv2d(64, 64, 3), torch.zeros(1, 64, 4, 4)),
            (nn.Linear(256, 256), torch.ones(1, 256)),
        ):
            for _ in range(6):
                model.eval()(value)
    assert set(map(type, asked)) == {nn.Linear}


def test_the_first_calls_are_compared(events: Any) -> None:
    accuracy, module = Accuracy("int8"), nn.Linear(4, 4)
    results = []
    assert not accuracy.is_due(module)  # Whether calls change the module is still unknown.
    while accuracy.is_due(module):
        x = torch.randn(2, 4)
        results.append(accuracy.compare(module, ((x,), {}), lambda x=x: module(x) * 1.5, module))  # type: ignore[misc]
    assert len(results) == MEASURED_CALLS == len(events())
    assert all(event["error_rms"] == pytest.approx(0.5) for event in events())
    assert {event["argmax_agreement"] for event in events()} == {1.0}


def test_arguments_are_changed_once_and_the_random_state_is_that_of_one_call(events: Any, monkeypatch: Any) -> None:
    """Unless other threads may draw, such as those that earlier tests of this process have left."""
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])

    class Cached(nn.Module):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x + torch.rand(3))
            return torch.stack(cache).sum(0)

    accuracy, module, cache = Accuracy("bf16"), Cached(), [torch.ones(3)]
    torch.manual_seed(1)
    got = accuracy.compare(module, ((torch.ones(3), cache), {}), lambda: module(torch.ones(3), cache), module)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(got, module(torch.ones(3), [torch.ones(3)]))
    assert torch.equal(after, torch.rand(1))
    assert len(cache) == 2
    assert events()[0]["error_max"] == 0


def test_arguments_that_cannot_be_copied_are_left_alone(events: Any) -> None:
    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies of this")

    Stubborn.__module__ = "transformers.cache_utils"
    accuracy, module = Accuracy("int4"), nn.Identity()
    given = Stubborn()
    assert accuracy.compare(module, ((given,), {}), lambda: module(given), module) is given
    assert not accuracy.is_due(module)
    assert events()[0]["reason"] == "not measured: no copies of this"


class Recurrent(nn.Module):
    """Keeps its last result, in an attribute or in a buffer."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.in_place = in_place
        self.register_buffer("last", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x + self.last).tanh()
        if self.in_place:
            self.last.copy_(y)
        else:
            self.last = y
        return y.clone()


@pytest.mark.parametrize("in_place", [True, False])
def test_modules_that_keep_results_run_once_for_each_call(in_place: bool, tmp_path: Any) -> None:
    module = Recurrent(in_place=in_place).eval()
    inputs = [torch.randn(1, WIDTH) for _ in range(6)]
    expected_of = copy.deepcopy(module)
    with torch.no_grad():
        expected = [expected_of(x) for x in inputs]
    with installed(tmp_path, TorchSettings(weights="int8")):
        got = [module(x) for x in inputs]
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


class Counting(nn.Module):
    """Has effects that cannot be seen in its attributes."""

    log: ClassVar[list[int]] = []
    counter = SimpleNamespace(calls=0)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.counter.calls += 1
        self.log.append(1)
        print("called")
        return self.linear(x)


class Counter:
    """Counts what its deep copies do too."""

    calls: ClassVar[list[int]] = []

    def __len__(self) -> int:
        self.calls.append(1)
        return 1


class Measuring(nn.Identity):
    def forward(self, counter: Counter) -> int:  # type: ignore[override]
        return len(counter)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("measured", [False, True])
def test_a_program_s_own_forward_runs_once_for_each_call(tmp_path: Any, capsys, precision, measured) -> None:
    module = nn.Sequential(Counting()).eval()
    Counting.log.clear()
    before = Counting.counter.calls
    settings = TorchSettings(weights="int8", precision=precision)
    with installed(tmp_path, settings, measured=measured) as plugin:
        for _ in range(30):
            module(torch.randn(1, WIDTH))
        assert [event["reason"] for event in plugin.events("accuracy")] == [
            "not measured: its own code would run twice"
        ]
    assert len(Counting.log) == Counting.counter.calls - before == capsys.readouterr().out.count("called") == 30


def test_objects_of_the_programs_own_are_used_once(events: Any) -> None:
    accuracy, module, counter = Accuracy("int8"), Measuring(), Counter()
    assert accuracy.compare(module, ((counter,), {}), lambda: module(counter), module) == 1
    assert len(Counter.calls) == 1
    assert "it is given an object of type Counter" in events()[0]["reason"]


def test_hooks_run_once_for_each_call(tmp_path: Any) -> None:
    module, seen = nn.Sequential(nn.Linear(WIDTH, WIDTH)).eval(), []
    module[0].register_forward_hook(lambda *_: seen.append(1))
    with installed(tmp_path, TorchSettings(weights="int8")):
        for _ in range(6):
            module(torch.randn(1, WIDTH))
    assert len(seen) == 6


def test_functions_of_the_program_inside_a_librarys_module_run_once_for_each_call(tmp_path: Any) -> None:
    seen: list[int] = []

    def activation(x: Tensor) -> Tensor:
        seen.append(1)
        return x.relu()

    module = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, activation=activation, batch_first=True).eval()
    with installed(tmp_path, TorchSettings(weights="int8")):
        for _ in range(6):
            module(torch.randn(1, 3, WIDTH))
    assert len(seen) == 6


def test_an_error_of_a_call_that_cannot_be_compared_has_no_context(events: Any) -> None:
    def fail() -> None:
        raise ValueError("the program's")

    with pytest.raises(ValueError, match="the program's") as raised:
        Accuracy("int4").compare(nn.Identity(), ((SimpleNamespace(),), {}), fail, fail)
    assert raised.value.__context__ is None
