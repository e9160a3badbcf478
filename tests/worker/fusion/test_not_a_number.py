"""Which operations stay unfused because NaN may reach them that comes of finite inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor  # noqa: E402

from cpulaunch.worker.fusion.exclusion import fusible  # noqa: E402
from cpulaunch.worker.fusion.not_a_number import LARGE, Safeguards, is_small, safeguards  # noqa: E402
from cpulaunch.worker.fusion.portable import function_of, graph_of, portable  # noqa: E402

pytestmark = pytest.mark.torch


def guarded(function: Callable[..., Tensor], *examples: Tensor) -> Safeguards:
    """What the graph of a function needs."""
    traced = torch.jit.trace(lambda *given: (function(*given),), examples, check_trace=False)
    return safeguards(portable(traced), examples)


def lost(function: Callable[[Tensor], Tensor]) -> list[str]:
    """The kinds of the operations that are left out."""
    found = guarded(function, torch.rand(2, 4))
    nodes = fusible(graph_of(found.graph))
    return [nodes[position].kind() for position in sorted(found.left_out)]


@pytest.mark.parametrize(
    "made",
    [
        torch.log,
        torch.sqrt,
        torch.rsqrt,
        torch.reciprocal,
        torch.acos,
        lambda x: x / x,
        lambda x: x / x.sum(-1, keepdim=True),
        lambda x: x / (x + 1e-6),
        lambda x: x / torch.zeros(4),
        lambda x: torch.sqrt(torch.add(x * x, x * x + 1, alpha=-1)),
        lambda x: x / (x * x),
        lambda x: x**0.5,
        lambda x: x**-2,
        lambda x: torch.remainder(x, x),
        lambda x: torch.floor_divide(x, x),
        lambda x: torch.addcdiv(x, x, x),
        lambda x: x ** torch.tensor([2.0, 2.5, 2.0, 2.0]),
        lambda x: torch.sqrt(x ** torch.tensor([2.0, 3.0, 2.0, 2.0])),
        lambda x: x / (x * x + 1e-60),
        lambda x: torch.where(x > 0, x, float("nan")),
        lambda x: torch.where(x > 0, x, torch.full_like(x, -float("inf"))).softmax(-1),
        lambda x: x * 10000.0**x,
        lambda x: x**8 - x**8,
        lambda x: x**4 * 1e3 * x - x,
        lambda x: torch.nn.functional.layer_norm(x, (4,), eps=0.0),
        lambda x: torch.nn.functional.group_norm(x, 2, eps=0.0),
        lambda x: torch.nn.functional.rms_norm(x, (4,), eps=0.0),
        lambda x: torch.nn.functional.rms_norm(x, (4,), eps=1e-60),
        lambda x: torch.nn.functional.batch_norm(x, torch.zeros(4), torch.zeros(4), eps=0.0),
        lambda x: torch.triangular_solve(x, x[:, :2])[0],
        lambda x: torch.linalg.solve_triangular(x[:, :2], x, upper=True),
        lambda x: (x * -1e38 * 10).softmax(-1),
        lambda x: x.half() @ x.half().T,
        torch.special.entr,
        torch.lgamma,
        lambda x: torch.sqrt(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)),
        lambda x: torch.log(1 - torch.sigmoid(x).clamp(1e-8, 1 - 1e-8)) * x,
        lambda x: torch.sqrt(torch.var_mean(x, -1, keepdim=True)[1]),
        lambda x: torch.sqrt(x.clamp(0, 1000).long().to(torch.int8) * 1.0),
        lambda x: x.masked_fill(x > 0, -float("inf")).softmax(-1),
        lambda x: ((x > 0) * -float("inf") + x).softmax(-1),
        lambda x: x.index_put((x > 0,), torch.tensor(-float("inf"))).softmax(-1),
        lambda x: x.scatter(-1, (x * 4).long(), -float("inf")).softmax(-1),
        lambda x: changed(x, lambda part: part.masked_fill_(x > 0, -float("inf")), view=False).softmax(-1),
        lambda x: (
            torch.baddbmm(torch.zeros(1, 2, 2).masked_fill_(x[:, :2] > 0, -float("inf")), x[None], x.T[None])
            .softmax(-1)
            .sum()
        ),
    ],
)
def test_what_loses_nan_stays_unfused_behind_what_makes_it(made: Callable[[Tensor], Tensor]) -> None:
    """A softmax that makes NaN of a row in which all is -infinity loses nothing itself."""
    found = lost(lambda x: torch.relu(made(x) + 1))
    assert [kind for kind in found if kind != "aten::softmax"] == ["aten::relu"]


@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.cat([x, torch.log(x)]).reshape(4, 4) @ torch.ones(4, 4),
        lambda x: torch.linalg.inv_ex(x[:2, :2]).inverse @ x,
        lambda x: torch.where(x > 0, -float("inf"), x).amax(-1, keepdim=True) @ torch.ones(1, 4),
        lambda x: x.masked_fill(x > 0, -float("inf")).softmax(-1) @ torch.ones(4, 4),
        lambda x: torch.nn.functional.linear(torch.log(x), torch.ones(3, 4)),
        lambda x: torch.nn.functional.linear(torch.exp(x), torch.zeros(3, 4)),
        lambda x: torch.nn.functional.linear(x**4, torch.full((3, 4), 1e3)),
    ],
)
def test_factors_of_a_product_behind_which_all_is_fused_are_looked_at(
    made: Callable[[Tensor], Tensor],
) -> None:
    value = torch.rand(2, 4)
    found = guarded(lambda x: torch.relu(made(x) + 1), value)
    assert (found.left_out, found.watched) == (frozenset(), 1)
    function = function_of(graph_of(found.graph))
    for scale in (1.0, 1e12, 1e30):
        given = value * scale
        assert not is_small(function(given)[-1]) or not made(given).isnan().any()
    assert not is_small(function(value * float("nan"))[-1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_mask_of_zeros_and_ones_must_be_one_where_it_decides(dtype: torch.dtype) -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return torch.relu((x + (1.0 - mask) * torch.finfo(x.dtype).min).softmax(-1))

    mask = torch.tensor([[1, 1, 1, 0]], dtype=dtype)
    found = guarded(masked, torch.rand(2, 4), mask)
    assert not found.left_out
    assert all(check.holds((torch.rand(2, 4), mask)) for check in found.checks)
    assert not all(check.holds((torch.rand(2, 4), mask - 2)) for check in found.checks)


def test_a_mask_that_overflows_to_infinity_is_not_fused_behind() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return torch.relu((x + (1.0 - mask) * -1e38 * 10).softmax(-1))

    assert guarded(masked, torch.rand(2, 4), torch.tensor([[1, 1, 1, 0]])).left_out


def test_inputs_are_looked_at_only_where_nan_of_them_could_be_lost() -> None:
    found = guarded(lambda x, y: torch.tanh(x @ x.T) + torch.relu(y), torch.rand(2, 4), torch.rand(2, 2))
    assert [check.place for check in found.checks] == [1]
    assert not guarded(lambda x: torch.tanh(x @ x.T), torch.rand(2, 4)).checks


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("columns", [6, LARGE])
def test_huge_numbers_that_cancel_are_seen(odd: float, dtype: torch.dtype, columns: int) -> None:
    value = torch.zeros(4, columns, dtype=dtype)
    assert is_small(value)
    assert is_small(value + 1)
    value[1, 2], value[2, 1] = odd, -odd
    assert not is_small(value)
    assert not is_small(value.T)


@pytest.mark.parametrize("count", [0, 4, LARGE])
def test_whole_numbers_are_compared_too(count: int) -> None:
    assert is_small(torch.ones(count, dtype=torch.int64))
    assert is_small(torch.ones(count, dtype=torch.bool))
    assert is_small(torch.full((count,), 1 << 60)) is (count == 0)


@pytest.mark.parametrize(
    ("function", "left_out"),
    [
        (torch.exp, []),
        (F.hardswish, []),
        (lambda x: F.hardswish(x * 1e30), ["aten::hardswish"]),
        (lambda x: F.hardswish(torch.sigmoid(x) * 1e30), []),
        (lambda x: F.layer_norm(x, (4,)), []),
        (lambda x: F.layer_norm(x * 1e30, (4,)), ["aten::layer_norm"]),
        (lambda x: torch.softmax(x, -1), []),
        (lambda x: torch.softmax(torch.log(x), -1), ["aten::softmax"]),
        (lambda x: torch.softmax(torch.where(x > 0, x, float("inf")), -1), ["aten::softmax"]),
        (lambda x: torch.softmax(torch.where(x > 0, x, -float("inf")), -1), []),
        (lambda x: F.max_pool2d(x[None, None], 2), []),
        (lambda x: F.max_pool2d((torch.tanh(x) * 2).masked_fill(x > 0, -float("inf"))[None], 2), ["aten::max_pool2d"]),
        (lambda x: F.max_pool2d((x + torch.full((2, 4), -float("inf")))[None], 2), ["aten::max_pool2d"]),
    ],
)
def test_what_loses_infinity_stays_unfused_where_there_may_be_one(
    function: Callable[[Tensor], Tensor], left_out: list[str]
) -> None:
    assert lost(function) == left_out


@pytest.mark.parametrize(
    "safe",
    [
        lambda x: x,
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x: (x - x.mean()) / torch.sqrt(x.var() + 1e-5),
        lambda x: (x - x.mean()) / (x.std() + 1e-5),
        lambda x: torch.nn.functional.normalize(x),
        lambda x: x / 8,
        lambda x: x / torch.tensor([0.2, 0.3, 0.2, 0.1]),
        lambda x: x / x.shape[-1],
        lambda x: torch.sqrt(x * x),
        lambda x: x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) / 4 + 1e-6),
        lambda x: torch.log(x.clamp(min=1e-6)),
        lambda x: torch.log1p(torch.relu(x)),
        lambda x: x**2,
        lambda x: torch.nan_to_num(torch.log(x)),
        lambda x: torch.sqrt(torch.nan_to_num(torch.relu(x), nan=1.0)),
        lambda x: torch.log(1 - torch.sigmoid(x).clamp(1e-7, 1 - 1e-7)) * x,
        lambda x: torch.sqrt(x.square().mean(-1, keepdim=True)),
        lambda x: torch.nn.functional.layer_norm(x, (4,)),
        lambda x: torch.softmax(x / 2.0, -1) @ torch.ones(4, 4),
        lambda x: x / ((~(x > 0)).cumsum(1, dtype=torch.float32)[:, -1:] + 1e-6),
        lambda x: (lambda variance, mean: (x - mean) * torch.rsqrt(variance + 1e-5))(*torch.var_mean(x, 0)),
        lambda x: torch.embedding(torch.ones(9, 4), torch.log(x + 1).to(torch.long)[0]),
        lambda x: x * 10000.0 ** torch.arange(0, 1, 0.25),
        lambda x: x.masked_fill(torch.ones(2, 4) > 0, -float("inf")).softmax(-1),
        lambda x: x.masked_fill(x > 0, torch.finfo(x.dtype).min).softmax(-1),
    ],
)
def test_what_cannot_make_nan_leaves_everything_fused(safe: Callable[[Tensor], Tensor]) -> None:
    assert lost(lambda x: torch.relu(safe(x) + 1)) == []


def changed(x: Tensor, change: Callable[[Tensor], object], *, view: bool) -> Tensor:
    """A tensor changed by way of a view of it; or, unless `view`, that view after a change of the tensor."""
    tensor = x.abs()
    other = tensor.view(-1)
    change(other if view else tensor)
    return tensor if view else other.view(2, 4)


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize(
    "made",
    [
        lambda x, view: changed(x, torch.log_, view=view),
        lambda x, view: changed(x, lambda part: part[:1].copy_(torch.log(x.view(-1)[:1])), view=view),
        lambda x, view: torch.sqrt(changed(x, lambda part: part.sub_(5.0), view=view)),
        lambda x, view: torch.log(changed(x, lambda part: part.fill_(-5.0), view=view) + 1),
    ],
)
def test_nan_that_is_written_to_memory_of_another_tensor_is_seen(made: Callable[..., Tensor], view: bool) -> None:
    assert lost(lambda x: torch.relu(made(x, view))) == ["aten::relu"]


def test_what_keeps_nan_is_fused_behind_what_makes_it() -> None:
    assert lost(lambda x: torch.tanh(torch.sigmoid(torch.log(x)) * 2)) == []
    assert lost(lambda x: torch.exp(torch.log(x)).clamp(0, 1)) == ["aten::exp", "aten::clamp"]


def test_the_sign_of_a_value_is_not_looked_for_without_end() -> None:
    def doubled(value: Tensor) -> Tensor:
        positive = value * value
        for _ in range(400):
            positive = positive + positive
            value = value / (positive + 1)
        return torch.log(positive + 1) + value

    assert lost(lambda x: torch.relu(doubled(x))) in ([], ["aten::relu"])
