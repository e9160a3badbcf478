"""Programs that run as they are also run with `--precision bf16`, where they would combine tensors of two modes."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.features import call_modes  # noqa: E402
from cpulaunch.worker.graph import cache  # noqa: E402
from cpulaunch.worker.tensors.kept import KeptTensors  # noqa: E402
from cpulaunch.worker.weights.resident import ResidentWeights  # noqa: E402
from tests.worker.capturing import Plugin, installed  # noqa: E402

pytestmark = pytest.mark.torch

SIZE, CALLS = 16, 40


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.calls = 0
        self.state: Any = None

    def forward(self, value: Any) -> Any:
        self.calls += 1
        return self.combine(value)

    def combine(self, value: Any) -> Any:
        return self.second(self.first(value))


class Recurrent(Part):
    def combine(self, value: Tensor) -> Tensor:
        self.state = self.first(value) if self.state is None else self.first(value) + self.second(self.state)
        return self.state


class LateRecurrent(Part):
    """Keeps a state from its third call on only."""

    def combine(self, value: Tensor) -> Tensor:
        result = self.first(value)
        if self.state is not None:
            result = result + self.second(self.state)
        if self.calls >= 3:
            self.state = result
        return result


class Indexed(Part):
    """Writes into a tensor of the program, which torch does only in its own dtype."""

    def combine(self, value: Tensor) -> Tensor:
        result = torch.zeros(4, SIZE)
        result[torch.tensor([0, 2])] = self.first(value)
        return result


class Record(Part):
    def combine(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        value["result"] = self.first(value["value"])
        return value


class Lstm(Part):
    """oneDNN has an LSTM in bf16 only where the CPU has instructions for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(SIZE, SIZE, 2, batch_first=True)

    def combine(self, value: Tensor) -> Tensor:
        return self.first(value[None])[0]


class WithoutPrimitive(Part):
    def combine(self, value: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")
        return self.first(value)


class Asserting(Part):
    def combine(self, value: Tensor) -> Tensor:
        result = self.first(value)
        assert result.dtype is torch.float32
        return result


class Checking(Part):
    def combine(self, value: Tensor) -> Tensor:
        result = self.first(value)
        if result.dtype is not torch.float32:
            raise ValueError("input must be float32")
        return result


class Equal(Part):
    """Modules that are compared by value cannot be keys."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


def values() -> Tensor:
    return torch.randn(2, SIZE)


def call_often(model: nn.Module) -> None:
    for _ in range(CALLS):
        assert model(values()).dtype is torch.float32


def read_hooks(model: nn.Module) -> None:
    seen: list[Tensor] = []
    model.first.register_forward_hook(lambda _module, _arguments, result: seen.append(result))
    for _ in range(CALLS):
        model(values())
        torch.mm(seen[0], seen[-1].T).numpy()


def read_argument(model: nn.Module) -> None:
    for _ in range(CALLS):
        record = {"value": values()}
        assert model(record) is record
        record["result"].numpy()


def train_then_evaluate(model: nn.Module) -> None:
    for _ in range(3):
        model.train()(values())
    call_often(model.eval())


PROGRAMS: list[tuple[type[Part], bool, Callable[[nn.Module], None]]] = [
    (Recurrent, False, call_often),
    (Recurrent, True, call_often),
    (Recurrent, False, train_then_evaluate),
    (LateRecurrent, False, call_often),
    (Indexed, False, call_often),
    (Indexed, True, call_often),
    (Lstm, False, call_often),
    (Lstm, True, call_often),
    (WithoutPrimitive, False, call_often),
    (WithoutPrimitive, True, call_often),
    (Asserting, False, call_often),
    (Asserting, True, call_often),
    (Checking, False, call_often),
    (Part, False, read_hooks),
    (Record, False, read_argument),
    (Equal, False, call_often),
]


@pytest.mark.parametrize(("kind", "training", "program"), PROGRAMS)
def test_programs_that_combine_tensors_of_several_calls_run(tmp_path: Path, kind, training: bool, program) -> None:
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True):
        program(kind().train(training))


def failing(tmp_path: Path, value: Any) -> tuple[Indexed, Plugin, Tensor]:
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True) as plugin:
        model = Indexed().eval()
        for _ in range(CALLS):
            result = model(value)
    return model, plugin, result


def test_only_the_call_that_fails_is_repeated(tmp_path: Path) -> None:
    model, plugin, result = failing(tmp_path, values())
    assert model.calls == CALLS + 1
    assert plugin.reasons().count("all calls are plain, because of dtypes") == 1
    assert result.dtype is torch.float32


def test_other_errors_reach_the_program_at_once(tmp_path: Path) -> None:
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True):
        model = Part().eval()
        model(values())
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(2, SIZE + 1))
    assert model.calls == 2


def test_an_assertion_that_fails_in_plain_calls_too_ends_no_mode(tmp_path: Path) -> None:
    class Limited(Part):
        def combine(self, value: Tensor) -> Tensor:
            assert len(value) < 3
            return self.first(value)

    model, value = Limited().eval(), values()
    with installed(tmp_path, TorchSettings(precision="bf16")) as plugin:
        exact = model(value)
        with pytest.raises(AssertionError):
            model(torch.ones(3, SIZE))
        assert not torch.equal(model(value), exact)
        assert plugin.reasons() == ""


@pytest.mark.parametrize(
    ("condition", "repeats"),
    [
        ("limit > low, f'{limit} must be above {low}'", 0),
        ("limit.real == 2", 1),
        ("box.ndim == 5", 0),
        ("layout is None", 1),
        ("limit > 0 and self.first(value) is None", 1),
        ("value is None", 1),
        ("box.result is None", 1),
        ("result is None", 1),
    ],
)
def test_an_assertion_about_arguments_repeats_no_call(tmp_path: Path, condition: str, repeats: int) -> None:
    lines = (
        *("def forward(self, value, limit=1, *, low=5, box=BOX):", "    self.calls += 1", "    ndim = 1"),
        "    result = box.result = self.first(value)",
        *(f"    assert {condition}", "    value = result", "    return result"),
    )
    found: dict[str, Any] = {"BOX": SimpleNamespace(ndim=2), "layout": 1}
    exec("\n".join(lines), found)  # Pytest writes assertions anew.
    model: Any = type("Asserted", (Part,), found)().eval()
    with installed(tmp_path, TorchSettings(precision="bf16")):
        model.train()  # No call of it needs care.
        for _ in range(3):
            with pytest.raises(AssertionError):
                model(values())
    assert model.calls == 3 * (1 + repeats)


def test_a_module_without_a_hash_runs_with_channels_last(tmp_path: Path) -> None:
    with installed(tmp_path, TorchSettings(channels_last=True), measured=True):
        call_often(Equal().eval())


def test_a_table_that_is_made_once_does_not_end_autocast(tmp_path: Path) -> None:
    class Table(Part):
        def combine(self, value: Tensor) -> Tensor:
            if self.state is None:
                self.state = torch.ones(SIZE)
            return self.first(value) + self.state

    with installed(tmp_path, TorchSettings(precision="bf16")):
        model, value = Table().eval(), values()
        exact, _, low = (model(value) for _ in range(3))
    assert not torch.equal(exact, low)


class Refreshed(Part):
    """Makes a part of its result anew at every second call only."""

    ended = 0

    def combine(self, value: Tensor) -> Tensor:
        if self.state is None or self.ended % 2:
            self.state = self.first(value)
        result = self.second(self.state) + value
        self.ended += 1
        return result


def test_a_call_that_waits_for_its_capture_may_use_what_an_earlier_one_has_left_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "is_too_early", lambda seconds, spent, *, imports: True)
    monkeypatch.setattr(KeptTensors, "found", lambda *given: False)  # Such as state that the first calls do not make.
    model, value = Refreshed().eval(), torch.randn(4, SIZE)
    with installed(tmp_path, TorchSettings(graph="onednn", precision="bf16"), measured=True):
        for _ in range(CALLS):
            result = model(value)
    torch.testing.assert_close(result, model.second(model.first(value)) + value, rtol=0.1, atol=0.1)


def test_a_call_that_waits_for_its_packing_may_use_what_an_earlier_one_has_left_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResidentWeights, "is_too_early", lambda *given: calls[0] >= 2)
    monkeypatch.setattr(KeptTensors, "found", lambda *given: False)
    calls, model, value = [0], Refreshed(), torch.randn(4, 256)
    model.first, model.second = nn.Linear(256, 256), nn.Linear(256, 256)
    model.eval()
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True):
        for calls[0] in range(CALLS):
            before = model.calls
            result = model(value)
            assert model.calls <= before + 3
    torch.testing.assert_close(result, model.second(model.first(value)) + value, rtol=0.1, atol=0.1)


class Flagged(Part):
    """Gives its features away once it is asked to: in an object, or as an attribute of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Keeping()

    def combine(self, value: Any, *, full: bool = False) -> Any:
        features = self.part(value)
        return Slots(features) if full else self.second(features)

    def forward(self, value: Any, *, full: bool = False) -> Any:
        return self.combine(value, full=full)


class Keeping(Part):
    keeps = False

    def combine(self, value: Tensor) -> Tensor:
        self.state = self.first(value) if self.keeps else None
        return self.first(value)


class Slots:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def returns_an_object(model: Any) -> Tensor:
    return model(values(), full=True).tensor


def keeps_an_attribute(model: Any) -> Tensor:
    model.part.keeps = True
    model(values())
    return model.part.state


def has_a_hook(model: Any) -> Tensor:
    seen: list[Tensor] = []
    hook = model.part.first.register_forward_hook(lambda _module, _arguments, result: seen.append(result))
    model(values())
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("look", [returns_an_object, keeps_an_attribute, has_a_hook])
def test_a_program_that_looks_inside_later_sees_its_own_types(tmp_path: Path, look: Any, measured: bool) -> None:
    model = Flagged().eval()
    model.part.keeps = False
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=measured):
        call_often(model)
        for _ in range(CALLS):
            look(model).numpy()
            model.part.keeps = False
            model(values())  # Without a look, as between two of them.


def test_a_module_that_keeps_tensors_in_calls_of_ever_new_forms_is_known_to(tmp_path: Path) -> None:
    model = Keeping().eval()
    model.keeps, model.forward = True, lambda value, name: model.combine(value)
    with installed(tmp_path, TorchSettings(precision="bf16")) as plugin:
        for number in range(2 * call_modes.MAX_FORMS):
            model(values(), f"request {number}")
            model.state.numpy()
        assert "keeps tensors" in plugin.reasons()


def test_an_error_of_what_is_read_of_a_module_keeps_no_arguments(tmp_path: Path) -> None:
    class Unreadable(Part):
        def modules(self) -> Any:
            raise RuntimeError("not here")

        def named_parameters(self, *given: Any, **options: Any) -> Any:
            raise RuntimeError("not here")

    model = Unreadable().eval()
    with installed(tmp_path, TorchSettings(precision="bf16", weights="bf16"), measured=True):
        gc.disable()
        try:
            value = values()
            reference = weakref.ref(value)
            model(value)
            model(value)
            del value
            assert reference() is None
        finally:
            gc.enable()


class Halved(Part):
    def combine(self, value: Tensor) -> Any:
        return {"half": self.first(value).half(), "bf16": [self.second(value).bfloat16()], "own": value}


def test_results_that_a_program_makes_low_stay_so(tmp_path: Path) -> None:
    model = Halved().eval()
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True):
        for _ in range(CALLS):
            result = model(values())
            assert result["half"].dtype is torch.float16
            assert result["bf16"][0].dtype is torch.bfloat16


def test_flags_of_calls_and_hooks_that_keep_nothing_end_no_mode(tmp_path: Path) -> None:
    model, value, seen = Flagged().eval(), values(), []
    with installed(tmp_path, TorchSettings(precision="bf16")) as plugin:
        exact = [model(value, full=False), model(value)]
        for number in range(2 * call_modes.MAX_FORMS):
            hook = model.part.first.register_forward_hook(lambda *given: seen.append(str(given[2].dtype)))
            low = [model(value, full=False), model(value), model(value)][-1]
            assert number or not torch.equal(exact[0], low)
            hook.remove()
        assert not torch.equal(exact[0], low)
        assert plugin.reasons() == ""
    assert seen[-1] == "torch.bfloat16"


def test_a_rank_does_not_repeat_a_call_that_its_program_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for what it sends again."""
    monkeypatch.setattr(call_modes, "ranks_in_job", lambda: 2)
    model = Part().eval()
    with installed(tmp_path, TorchSettings(precision="bf16")):
        model(torch.randn(4, SIZE))
        calls = model.calls
        model.combine = lambda value: (_ for _ in ()).throw(AssertionError)
        with pytest.raises(AssertionError):
            model(torch.randn(4, SIZE))
    assert model.calls == calls + 1
