"""Which operations stay unfused because NaN may reach them that comes of finite inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cpulaunch.worker.fusion.exclusion import fusible  # noqa: E402
from cpulaunch.worker.fusion.not_a_number import losing  # noqa: E402

pytestmark = pytest.mark.torch


def lost(function: Callable[[Tensor], Tensor]) -> list[str]:
    """The kinds of the operations that are left out."""
    graph = torch.jit.trace(function, torch.rand(2, 4), check_trace=False).graph
    torch._C._jit_pass_constant_propagation(graph)
    nodes = fusible(graph)
    return [nodes[position].kind() for position in sorted(losing(graph, nodes))]


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
        lambda x: torch.cat([x, torch.log(x)]).reshape(4, 4) @ torch.ones(4, 4),
        lambda x: torch.floor_divide(x, x),
        lambda x: torch.addcdiv(x, x, x),
        lambda x: x ** torch.tensor([2.0, 2.5, 2.0, 2.0]),
        lambda x: torch.sqrt(x ** torch.tensor([2.0, 3.0, 2.0, 2.0])),
        lambda x: x / (x * x + 1e-60),
        lambda x: torch.linalg.inv_ex(x[:2, :2]).inverse @ x,
        lambda x: torch.where(x > 0, x, float("nan")),
        lambda x: torch.where(x > 0, x, torch.full_like(x, -float("inf"))).softmax(-1),
        torch.special.entr,
        torch.lgamma,
        lambda x: x.masked_fill(x > 0, -float("inf")).softmax(-1),
        lambda x: ((x > 0) * -float("inf") + x).softmax(-1),
        lambda x: x.index_put((x > 0,), torch.tensor(-float("inf"))).softmax(-1),
        lambda x: x.scatter(-1, (x * 4).long(), -float("inf")).softmax(-1),
        lambda x: changed(x, lambda part: part.masked_fill_(x > 0, -float("inf")), view=False).softmax(-1),
        lambda x: torch.where(x > 0, -float("inf"), x).amax(-1, keepdim=True) @ torch.ones(1, 4),
        lambda x: (
            torch.baddbmm(torch.zeros(1, 2, 2).masked_fill_(x[:, :2] > 0, -float("inf")), x[None], x.T[None])
            .softmax(-1)
            .sum()
        ),
    ],
)
def test_what_loses_nan_stays_unfused_behind_what_makes_it(made: Callable[[Tensor], Tensor]) -> None:
    assert lost(lambda x: torch.relu(made(x) + 1)) == ["aten::relu"]


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
        lambda x: torch.nn.functional.layer_norm(x, (4,)),
        lambda x: torch.softmax(x / 2.0, -1) @ torch.ones(4, 4),
        lambda x: x / ((~(x > 0)).cumsum(1, dtype=torch.float32)[:, -1:] + 1e-6),
        lambda x: (lambda variance, mean: (x - mean) * torch.rsqrt(variance + 1e-5))(*torch.var_mean(x, 0)),
        lambda x: torch.embedding(torch.ones(9, 4), torch.log(x + 1).to(torch.long)[0]),
        lambda x: x * 10000.0**x,
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
