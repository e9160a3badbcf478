"""Recognized norms: equal to torch's within rounding, and left alone where the class computes anything else."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.weights.library import library  # noqa: E402
from cpulaunch.worker.weights.norms import recognized  # noqa: E402
from cpulaunch.worker.weights.resident import ResidentWeights  # noqa: E402

pytestmark = pytest.mark.torch

WIDTH = 192
COUNTER: list[int] = []


class Base(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.variance_epsilon = eps


class LlamaLike(Base):
    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class T5Like(Base):
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class GemmaLike(Base):
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class Functional(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (192,), self.weight, self.variance_epsilon)


class TwoEpsilons(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon + 1.0))


class Cubic(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + self.variance_epsilon))


class OtherAxis(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.variance_epsilon))


class Twice(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class Half(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)


class Counting(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = 1
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class Appending(Base):
    def forward(self, x: Tensor) -> Tensor:
        COUNTER.append(1)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class Masked(Base):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)) * scale


class InPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        x *= torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * x


class OfClass(Base):
    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Inheriting(T5Like):
    pass


class Helped(Base):
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight


NORMS: tuple[Callable[[], nn.Module], ...] = (
    LlamaLike,
    T5Like,
    GemmaLike,
    Functional,
    lambda: nn.RMSNorm(WIDTH),
    lambda: nn.RMSNorm(WIDTH, eps=1e-3),
)
OTHERS = (TwoEpsilons, Cubic, OtherAxis, Twice, Half, Counting, Appending, Masked, InPlace, OfClass)
needs_library = pytest.mark.skipif(library() is None, reason="cpulaunch is installed without its compiled library")


class Model(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def run(weights: ResidentWeights, model: nn.Module, x: Tensor) -> Tensor:
    assert weights.covers(model)
    with torch.no_grad(), weights.active(model):
        result: Tensor = model(x)
    return result


def norms_used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    loaded, used = library(), []
    assert loaded is not None
    plain = loaded.rms_norm
    monkeypatch.setattr(loaded, "rms_norm", lambda *arguments: (used.append(arguments), plain(*arguments)))
    return used


@needs_library
@pytest.mark.parametrize("make", NORMS)
@pytest.mark.parametrize("shape", [(1, 1, WIDTH), (WIDTH,), (5, WIDTH)], ids=str)
def test_norms_are_equal_within_rounding(
    make: Callable[[], nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = norms_used(monkeypatch)
    model, weights = Model(make()).eval(), ResidentWeights("fp32", TorchSettings())
    for scale in (1.0, 1e-4, 1e4):
        x = torch.randn(*shape) * scale
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(run(weights, model, x), expected, rtol=2e-5, atol=2e-5)
    assert len(used) == 3


@pytest.mark.parametrize("make", OTHERS)
def test_other_classes_are_left_alone(make: type[nn.Module]) -> None:
    COUNTER.clear()
    assert recognized(make().eval()) is None
    assert not COUNTER


@needs_library
def test_what_the_program_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    used = norms_used(monkeypatch)
    model, weights, x = Model(LlamaLike()).eval(), ResidentWeights("fp32", TorchSettings()), torch.randn(1, WIDTH)

    def check(uses: int) -> None:
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(run(weights, model, x), expected, rtol=2e-5, atol=2e-5)
        assert len(used) == uses

    check(1)
    model.norm.weight.data.mul_(3)  # type: ignore[union-attr,operator]
    check(2)
    model.norm.variance_epsilon = 0.5  # type: ignore[assignment]
    check(2)
    model.norm.variance_epsilon = 1e-6  # type: ignore[assignment]
    check(3)
    model.norm.weight = nn.Parameter(torch.randn(WIDTH))  # type: ignore[union-attr]
    check(4)
    handle = model.norm.register_forward_hook(lambda module, args, result: result * 2)  # type: ignore[union-attr]
    check(5)
    handle.remove()
    monkeypatch.setattr(LlamaLike, "forward", lambda self, x: x + 1)
    check(5)
    model.to(torch.bfloat16)
    x = x.to(torch.bfloat16)
    check(5)


def test_many_rows_and_odd_layouts_are_torchs() -> None:
    model, weights = Model(LlamaLike()).eval(), ResidentWeights("fp32", TorchSettings())
    for x in (torch.randn(40, WIDTH), torch.randn(WIDTH, 4).t(), torch.randn(0, WIDTH)):
        with torch.no_grad():
            torch.testing.assert_close(run(weights, model, x), model(x), rtol=2e-5, atol=2e-5)


@needs_library
def test_the_input_may_be_named() -> None:
    model, weights, x = Model(T5Like()).eval(), ResidentWeights("fp32", TorchSettings()), torch.randn(1, WIDTH)
    assert weights.covers(model)
    with torch.no_grad(), weights.active(model):
        got = model.norm(hidden_states=x)
    torch.testing.assert_close(got, model.norm(x))


def _set_epsilon(model: Any) -> None:
    model.norm.eps = 10.0


def _set_tensor(model: Any) -> None:
    model.norm.variance_epsilon = torch.full((WIDTH,), 10.0)


def _set_helper(model: Any) -> None:
    model.norm._norm = lambda x: x * 5


def _set_helper_of_class(model: Any) -> None:
    type(model.norm)._norm = lambda self, x: x * 5


@needs_library
@pytest.mark.parametrize(
    ("norm", "change"),
    [
        (lambda: nn.RMSNorm(WIDTH), _set_epsilon),
        (Helped, _set_tensor),
        (Helped, _set_helper),
        (Helped, _set_helper_of_class),
    ],
)
def test_what_forward_reads_and_calls_may_change(norm: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Helped, "_norm", Helped._norm)  # Restored at the end.
    used = norms_used(monkeypatch)
    model, weights, x = Model(norm()).eval(), ResidentWeights("fp32", TorchSettings()), torch.randn(1, WIDTH)
    run(weights, model, x)
    assert len(used) == 1
    change(model)
    with torch.no_grad():
        torch.testing.assert_close(run(weights, model, x), model(x))


@needs_library
def test_a_class_that_inherits_its_forward_still_does_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    used = norms_used(monkeypatch)
    run(ResidentWeights("fp32", TorchSettings()), Model(Inheriting()).eval(), torch.randn(1, WIDTH))
    assert used
    assert "forward" not in vars(Inheriting)


@needs_library
def test_a_norm_is_scripted_during_a_call() -> None:
    model, weights, x = Model(LlamaLike()).eval(), ResidentWeights("fp32", TorchSettings()), torch.randn(1, WIDTH)
    plain = LlamaLike.forward
    run(weights, model, x)
    with torch.no_grad(), weights.active(model):
        assert LlamaLike.forward is not plain
        scripted = torch.jit.script(model.norm)
    assert torch.equal(scripted(x), model.norm(x))
