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
    ],
)
def test_what_cannot_make_nan_leaves_everything_fused(safe: Callable[[Tensor], Tensor]) -> None:
    assert lost(lambda x: torch.relu(safe(x) + 1)) == []


def test_what_keeps_nan_is_fused_behind_what_makes_it() -> None:
    assert lost(lambda x: torch.tanh(torch.sigmoid(torch.log(x)) * 2)) == []
    assert lost(lambda x: torch.exp(torch.log(x)).clamp(0, 1)) == ["aten::exp", "aten::clamp"]


def test_the_sign_of_a_value_is_not_looked_for_without_end() -> None:
    def doubled(value: Tensor) -> Tensor:
        positive = value * value
        for _ in range(400):
            positive = positive + positive
        return torch.log(positive + 1)

    assert lost(lambda x: torch.relu(doubled(x))) == ["aten::relu"]
