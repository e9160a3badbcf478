"""Products that differ from a layer's usual ones have torch's own result, or torch's own error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor, nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.weights.resident import ResidentWeights  # noqa: E402

pytestmark = pytest.mark.torch

WIDTH = 256
BF16 = torch.bfloat16


class Program(nn.Module):
    """Calls `compute(self, x)` and counts its calls."""

    def __init__(self, compute: Callable[..., Any], dtype: Any = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.compute = compute
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.compute(self, x)


def outcome(module: nn.Module, x: Any, context: Any) -> Any:
    try:
        with context():
            return module(x)
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error)


def compare(program: Program, inputs: list[Any], *, kind: str = "fp32", context: Any = torch.no_grad) -> None:
    """Raises: AssertionError unless each call has the result or the type of error that it has without the plugin."""
    weights, expected_of = ResidentWeights(kind, TorchSettings()), copy.deepcopy(program).eval()
    program.eval()
    for x in inputs:
        with weights.active(program):
            got = outcome(program, x, context)
        expected = outcome(expected_of, x, context)
        if isinstance(expected, Tensor):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        else:
            assert got is expected


def rows(dtype: Any = torch.float32, count: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, dtype=dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def doubled_products() -> Any:
    class Double(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch._C._nn.linear else result

    return Double()


def tangent(module: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module.linear(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def in_mode(module: Any, x: Tensor) -> Tensor:
    with doubled_products():
        return module.linear(x)


BIASES: dict[str, Callable[[Any], Tensor]] = {
    "one element": lambda module: torch.full((1,), 3.0),
    "no dimension": lambda module: torch.tensor(3.0),
    "one for each row of the input": lambda module: torch.arange(4.0)[:, None].expand(4, WIDTH),
    "expanded": lambda module: torch.full((1,), float(module.calls)).expand(WIDTH),
    "computed at each call": lambda module: module.linear.bias * float(module.calls) * 10,
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_biases_of_any_kind_are_those_of_this_call(name: str, context: Any) -> None:
    program = Program(lambda module, x: F.linear(x, module.linear.weight, BIASES[name](module)))
    compare(program, [rows(count=4) for _ in range(6)], context=context)


def test_a_bias_in_bf16_that_is_computed_at_each_call_is_not_an_earlier_one() -> None:
    bias = BIASES["computed at each call"]
    program = Program(lambda module, x: F.linear(x, module.linear.weight, bias(module)), BF16)
    compare(program, [rows(BF16) for _ in range(10)], kind="bf16")


def test_a_bias_in_bf16_that_is_changed_through_data_is_noticed() -> None:
    def change(module: Any, x: Tensor) -> Tensor:
        module.linear.bias.data.add_(5)
        return module.linear(x)

    compare(Program(change, BF16), [rows(BF16) for _ in range(6)], kind="bf16")


ERRORS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "columns": (torch.randn(1, WIDTH - 1), lambda module, x: module.linear(x)),
    "no dimension": (torch.tensor(1.0), lambda module, x: module.linear(x)),
    "dtype": (rows(BF16), lambda module, x: module.linear(x)),
    "addmm": (torch.randn(1, 3), lambda module, x: torch.addmm(module.linear.bias, x, module.linear.weight)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_torchs(name: str) -> None:
    x, compute = ERRORS[name]
    compare(Program(compute), [rows(), rows(), rows(), x])


def test_errors_of_biases_are_torchs() -> None:
    for bias in (torch.ones(7), torch.ones(WIDTH, dtype=torch.float64)):
        program = Program(
            lambda module, x, bias=bias: F.linear(x, module.linear.weight, bias if module.calls > 3 else None)
        )
        compare(program, [rows() for _ in range(4)])


INPUTS: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(WIDTH)[:2].to_sparse(),
    "sparse rows": lambda: torch.eye(WIDTH)[:2].to_sparse_csr(),
    "negated view": lambda: torch._neg_view(rows()),
    "imaginary part of a conjugate": lambda: torch.randn(1, WIDTH, dtype=torch.complex64).conj().imag,
    "nested": lambda: torch.nested.nested_tensor([rows(), rows()]),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested).*:UserWarning")
def test_inputs_whose_memory_is_not_their_values(name: str) -> None:
    def compute(module: Any, x: Tensor) -> Tensor:
        y = F.linear(x, module.linear.weight, module.linear.bias if x.is_nested else None)
        return torch.cat(list(y.unbind())) if y.is_nested else y

    compare(Program(compute), [rows(), rows(), rows(), INPUTS[name]()])


@pytest.mark.parametrize("compute", [tangent, in_mode])
def test_what_the_program_does_with_torchs_own_products(compute: Any) -> None:
    compare(Program(compute), [rows() for _ in range(4)])


def test_a_default_device_changes_nothing() -> None:
    weights, module = ResidentWeights("int8", TorchSettings()), nn.Linear(WIDTH, WIDTH).eval()
    with torch.no_grad(), torch.device("cpu"), weights.active(module):
        for _ in range(3):
            module(rows())
    assert weights.bytes


@pytest.mark.filterwarnings("ignore:.*addmm.*:UserWarning")
def test_addmm_takes_factors_by_position() -> None:
    compare(Program(lambda module, x: torch.addmm(0.5, module.linear.bias, 2.0, x, module.linear.weight)), [rows()] * 4)
    compare(Program(lambda module, x: torch.addmm(0.5, module.linear.bias, x, module.linear.weight)), [rows()] * 4)
    compare(Program(lambda module, x: torch.addmm(torch.ones(1), x, module.linear.weight)), [rows()] * 4)
