"""Backward passes that take one type only run in training with `--precision bf16`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from tests.worker.capturing import installed  # noqa: E402

pytestmark = pytest.mark.torch

SIZE = 64


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0].mm(weight), gradients[0].t().mm(x)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


class Failing(Doubling):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Trained.failures += 1
        raise RuntimeError("no gradient")


class Numpy(Doubling):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.from_numpy(gradients[0].numpy() * 2)


class Trained(nn.Module):
    failures = 0

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(SIZE, SIZE), nn.Parameter(torch.eye(SIZE))
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.layer(x), self.weight)


class Accumulating(torch.autograd.Function):
    """As operators that add to a gradient by themselves: a backward pass that ran twice would double it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x.mm(weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        ctx.weight.sum_of_gradients += gradients[0].t().mm(x)
        return gradients[0].mm(ctx.weight), None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class SaysItsTypes(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def plain_decorator(function: Any) -> Any:
    @functools.wraps(function)
    def decorated(*args: Any) -> Any:
        return function(*args)

    return decorated


class InPlaceBelow(InPlace):
    forward = staticmethod(plain_decorator(InPlace.forward))


class ForGpus(Product):
    """As of programs for GPUs, in which torch.cuda.amp.custom_fwd is usual."""

    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cuda"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cuda"))


@torch.library.custom_op("cpulaunch_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t().to(x.dtype)


product.register_autograd(
    lambda ctx, gradient: (gradient.mm(ctx.saved_tensors[1]), gradient.t().mm(ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


ADJACENCY = torch.eye(SIZE).to_sparse()

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "function": lambda x, weight: Product.apply(x, weight),
    "function for GPUs": lambda x, weight: ForGpus.apply(x, weight),
    "custom operator": lambda x, weight: product(x, weight),
    "function in a checkpoint": lambda x, weight: checkpoint(Product.apply, x, weight, use_reentrant=False),
    "function in a reentrant checkpoint": lambda x, weight: checkpoint(Product.apply, x, weight, use_reentrant=True),
    "function of arguments": lambda x, weight: x + Product.apply(torch.ones(SIZE, SIZE), weight),
    "function with numpy": lambda x, weight: Numpy.apply(x),
    "sparse": lambda x, weight: torch.sparse.mm(ADJACENCY, x),
    "sparse in fp32": lambda x, weight: torch.sparse.mm(ADJACENCY, weight) + x,
    "sparse sum": lambda x, weight: torch.sparse.addmm(weight, ADJACENCY, x),
    "pinv": lambda x, weight: torch.linalg.pinv(weight) + x,
    "pdist": lambda x, weight: nn.functional.pdist(x),
    "i1": lambda x, weight: torch.special.i1(x) + torch.special.i1e(x),
    "addr": lambda x, weight: torch.addr(weight, x[:, 0], x[0]),
    "widened again": lambda x, weight: checkpoint(Product.apply, x, weight, use_reentrant=False).float(),
    "product": lambda x, weight: x @ weight,
}


class EnablingGradients(Trained):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    with torch.set_grad_enabled(not isinstance(model, EnablingGradients)):
        result = model(x)
    with torch.enable_grad():
        result.square().mean().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", [EnablingGradients, Trained])  # In this order: nothing has been trained before.
def test_a_backward_pass_that_takes_one_type_runs(tmp_path: Path, name: str, kind: type[Trained]) -> None:
    torch.manual_seed(0)
    model, x = kind(OPERATIONS[name]), torch.randn(SIZE, SIZE)
    expected = gradients(model, x)
    with installed(tmp_path, TorchSettings(precision="bf16")):
        got = [gradients(model, x) for _ in range(2)][1]
    tolerance = 0.02 * max(float(one.abs().max()) for one in expected)
    for one, other in zip(expected, got, strict=True):
        assert other.dtype is torch.float32
        torch.testing.assert_close(other, one, rtol=0.1, atol=tolerance)


def test_a_backward_pass_runs_once(tmp_path: Path) -> None:
    def accumulate(x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = Accumulating.apply(x, weight)
        return result

    torch.manual_seed(0)
    model, x = Trained(accumulate), torch.randn(SIZE, SIZE)
    model.weight.sum_of_gradients = torch.zeros(SIZE, SIZE)
    gradients(model, x)
    expected = model.weight.sum_of_gradients.clone()
    with installed(tmp_path, TorchSettings(precision="bf16")):
        gradients(model, x)
    torch.testing.assert_close(model.weight.sum_of_gradients, 2 * expected, rtol=0.1, atol=1e-3)


def types_seen(kind: Any, tmp_path: Path) -> tuple[Any, ...]:
    """Of an argument in bf16 and of what such an operator makes of it, in training."""
    seen: list[Any] = []

    def operate(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = kind.apply(x)
        seen.extend((x.dtype, y.dtype))
        return y

    with installed(tmp_path, TorchSettings(precision="bf16")):
        gradients(Trained(operate), torch.randn(SIZE, SIZE))
    return tuple(seen)


def test_operators_keep_bf16_that_say_so_or_write_to_arguments(tmp_path: Path) -> None:
    assert types_seen(Numpy, tmp_path) == (torch.bfloat16, torch.float32)
    assert types_seen(SaysItsTypes, tmp_path) == (torch.bfloat16, torch.bfloat16)
    assert types_seen(InPlace, tmp_path) == (torch.bfloat16, torch.bfloat16)
    assert types_seen(InPlaceBelow, tmp_path) == (torch.bfloat16, torch.bfloat16)


def test_operators_in_the_programs_own_autocast_keep_its_types(tmp_path: Path) -> None:
    with installed(tmp_path, TorchSettings(precision="bf16")):
        model = Trained(lambda x, weight: Product.apply(x, weight.bfloat16()))
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(torch.randn(SIZE, SIZE)).dtype is torch.bfloat16


def test_a_checkpoint_in_the_programs_own_autocast_computes_the_same_again(tmp_path: Path) -> None:
    model = Trained(lambda x, weight: checkpoint(Product.apply, x, weight.bfloat16(), use_reentrant=False))
    loss = nn.Sequential(nn.Linear(SIZE, 1))
    with installed(tmp_path, TorchSettings(precision="bf16")), torch.enable_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(torch.randn(SIZE, SIZE))
        loss(result.float()).sum().backward()
    assert model.layer.weight.grad is not None


def test_other_errors_of_a_backward_pass_reach_the_program_at_once(tmp_path: Path) -> None:
    Trained.failures = 0
    with installed(tmp_path, TorchSettings(precision="bf16")), pytest.raises(RuntimeError, match="no gradient"):
        gradients(Trained(lambda x, weight: Failing.apply(x)), torch.randn(SIZE, SIZE))
    assert Trained.failures == 1


def test_the_programs_own_autocast_keeps_its_types(tmp_path: Path) -> None:
    with installed(tmp_path, TorchSettings(precision="bf16")):
        gradients(Trained(OPERATIONS["sparse"]), torch.randn(SIZE, SIZE))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.sparse.mm(ADJACENCY, torch.ones(SIZE, SIZE)).dtype is torch.bfloat16


class Views(nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.view = nn.Linear(SIZE, SIZE), view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            result = self.layer(x)
            return result, self.view(result)


@pytest.mark.parametrize("view", [lambda x: x[:, :2], lambda x: x[:1].expand(3, -1), lambda x: x.chunk(2)[1]])
def test_views_of_results_have_gradients_and_can_be_written(tmp_path: Path, view: Callable[[Tensor], Tensor]) -> None:
    model = Views(view)
    with installed(tmp_path, TorchSettings(precision="bf16")):
        with torch.no_grad():
            _, part = model(torch.randn(4, SIZE))
        with torch.enable_grad():
            part.sum().backward()
            assert model.layer.weight.grad is not None
            if 0 not in part.stride():
                part.mul_(2)


class Written(nn.Module):
    """Its result is written to after views of it were made."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.layer, self.alone = nn.Linear(SIZE, SIZE), alone

    def forward(self, x: Tensor) -> list[Tensor]:
        result = self.layer(x)
        with torch.no_grad():
            start = result[:2]
        parts = [*result.chunk(2), start]
        result.relu_()
        return parts if self.alone else [result, *parts]


@pytest.mark.parametrize("alone", [False, True])
def test_views_of_what_is_written_to_later_can_be_read(tmp_path: Path, alone: bool) -> None:
    model = Written(alone=alone)
    with installed(tmp_path, TorchSettings(precision="bf16")), torch.enable_grad():
        results = model(torch.randn(4, SIZE))
        if not alone:
            results[0].sum().backward()
            assert model.layer.weight.grad is not None
    assert [each.dtype for each in results] == [torch.float32] * len(results)
    assert all(each.detach().min() >= 0 for each in results)


@pytest.mark.parametrize("name", ["addr", "i1", "pinv", "sparse in fp32"])
def test_what_runs_in_inference_can_be_compiled_in_the_programs_autocast(tmp_path: Path, name: str) -> None:
    x, weight = torch.randn(SIZE, SIZE), torch.eye(SIZE)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.compile(OPERATIONS[name], backend="aot_eager")(x, weight)
        torch._dynamo.reset()
        with installed(tmp_path, TorchSettings(precision="bf16")):
            with torch.autocast("cpu", enabled=False):
                Trained(OPERATIONS[name]).eval()(x)
            result = torch.compile(OPERATIONS[name], backend="aot_eager")(x, weight)
    assert result.dtype is expected.dtype
    torch.testing.assert_close(result, expected)
