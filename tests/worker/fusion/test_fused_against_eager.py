"""Made-up chains of operations, fused with their safeguards, give what eager execution gives, for odd inputs too."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from math import inf, nan

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor  # noqa: E402

from cpulaunch.worker.fusion.not_a_number import safeguards  # noqa: E402
from cpulaunch.worker.fusion.portable import portable  # noqa: E402
from cpulaunch.worker.fusion.trials import Trials  # noqa: E402
from cpulaunch.worker.graph.onednn import Frozen, UnboundedError, compile_graph  # noqa: E402
from cpulaunch.worker.tensors.compare import ROUNDING, largest_error  # noqa: E402

pytestmark = pytest.mark.torch

SHAPE = (4, 8)
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) / 3
HIDDEN = torch.arange(8) > 5
Operation = Callable[[Tensor, Tensor], Tensor]

MAKING: dict[str, Operation] = {
    "log": lambda x, y: torch.log(x),
    "root": lambda x, y: torch.sqrt(x),
    "quotient": lambda x, y: x / y,
    "reciprocal": lambda x, y: torch.reciprocal(x),
    "power": lambda x, y: x**1.5,
    "cube": lambda x, y: x**3,
    "exp": lambda x, y: torch.exp(x),
    "huge": lambda x, y: x * 1e30,
    "tiny": lambda x, y: x * 1e-30,
    "product": lambda x, y: F.linear(x, WEIGHT),
    "of_zeros": lambda x, y: F.linear(x, torch.zeros(8, 8)),
    "scores": lambda x, y: x @ y.T @ y,
    "numbers": lambda x, y: torch.nan_to_num(x, nan=0.5, posinf=1.0, neginf=-1.0),
    "default_numbers": lambda x, y: torch.nan_to_num(x),
    "larger": lambda x, y: torch.fmax(x, y),
    "extreme": lambda x, y: x.amax(-1, keepdim=True) * y,
    "sum": lambda x, y: x.sum(-1, keepdim=True) + y,
    "variance": lambda x, y: torch.var_mean(x, -1, keepdim=True)[0] + y,
    "mean": lambda x, y: torch.var_mean(x, -1, keepdim=True)[1] + y,
    "hidden": lambda x, y: x.masked_fill(HIDDEN, -inf),
    "hidden_by_input": lambda x, y: x.masked_fill(y > 1, -inf),
    "narrow": lambda x, y: (y.clamp(0, 1000).long().to(torch.int8) * 1.0).sqrt() + x,
    "broadcast": lambda x, y: x[:1] + y,
    "column": lambda x, y: x[:, :1] * y,
    "changed": lambda x, y: x.clone().mul_(y),
    "transposed": lambda x, y: x.T.reshape(SHAPE),
    "cat": lambda x, y: torch.cat([x, y], -1)[:, 4:12],
    "bounded_odds": lambda x, y: torch.log1p(-torch.sigmoid(y).clamp(max=1 - 1e-8)) + x,
}
LOSING: dict[str, Operation] = {
    "relu": lambda x, y: torch.relu(x),
    "relu6": lambda x, y: F.relu6(x),
    "relu_in_place": lambda x, y: torch.relu_(x + y),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "clamp": lambda x, y: x.clamp(-2, 3),
    "exp": lambda x, y: torch.exp(x),
    "softmax": lambda x, y: x.softmax(-1),
    "softmax_of_columns": lambda x, y: x.softmax(0) * y,
    "layer_norm": lambda x, y: F.layer_norm(x, (8,)),
    "hardswish": lambda x, y: F.hardswish(x),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x) + y,
    "tanh": lambda x, y: torch.tanh(x),
    "pooled": lambda x, y: F.max_pool2d(x[None, None], 2),
    "product": lambda x, y: F.linear(torch.relu(x), WEIGHT),
}
ODD = (nan, inf, -inf, 1e15, -1e15, 1e-40, 0.0, -0.0)
"""Products of larger numbers overflow, or not, by the order in which their terms are added up."""


def inputs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Numbers as programs have them."""
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def odd_inputs(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Those, and others in which an element, a row or all is odd."""
    yield inputs(generator)
    for place, value in enumerate(ODD):
        pair = inputs(generator)
        pair[place % 2].view(-1)[place] = value
        yield pair
        pair = inputs(generator)
        pair[1 - place % 2][place % SHAPE[0]] = value
        yield pair
        yield torch.full(SHAPE, value), pair[1].abs() + 1


def program(names: list[str]) -> Callable[[Tensor, Tensor], tuple[Tensor]]:
    """The operations one after another."""
    operations = MAKING | LOSING

    def run(x: Tensor, y: Tensor) -> tuple[Tensor]:
        for name in names:
            x = operations[name](x, y)
        return (x,)

    return run


@pytest.fixture(scope="module")
def trials(tmp_path_factory) -> Iterator[Trials]:
    trials = Trials(300.0, folder=str(tmp_path_factory.mktemp("graphs")), wait=True)
    yield trials
    trials.close()


FOUND = {
    18: ["numbers", "cube", "softmax_of_columns"],
    29: ["hidden", "of_zeros", "huge", "clamp"],
    38: ["hidden_by_input", "of_zeros", "column", "relu6"],
    81: ["power", "scores", "bounded_odds", "relu_in_place"],
}
"""Chains by the seeds of their inputs, which gave other values once, or wrote beyond a block of memory."""


@pytest.mark.parametrize("seed", FOUND)
def test_chains_that_gave_something_else_once(trials: Trials, seed: int) -> None:
    compared(FOUND[seed], torch.Generator().manual_seed(seed), trials)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_fused_chains_give_what_eager_execution_gives(trials: Trials, seed: int) -> None:
    chosen, fused = random.Random(seed), 0
    for name in LOSING:
        names = [*chosen.choices(sorted(MAKING), k=chosen.choice((1, 2, 2, 3))), name]
        fused += compared(names, torch.Generator().manual_seed(seed), trials)
    assert fused >= 20


def compared(names: list[str], generator: torch.Generator, trials: Trials) -> int:
    """The number of calls that the graph took. Raises: AssertionError if one gave something else than eager."""
    function, calls = program(names), 0
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = inputs(generator)
        if not all(each.isfinite().all() for each in function(*given)):
            given = given[0].abs() + 0.5, given[1].abs() + 0.5
        source = portable(torch.jit.trace(function, given, check_trace=False))
        kept = safeguards(source, given)
        frozen = Frozen(safeguards=kept, used=(0, 1), bytes=0)
        outcome = trials.outcome(kept.graph, given, kept.left_out) if frozen.accepts(given) else None
        if outcome is None or outcome.refusal is not None:
            return 0
        run = compile_graph(frozen, outcome.left_out, given)
        for pair in odd_inputs(generator):
            if not frozen.accepts(pair):
                continue
            before = [each.clone() for each in pair]
            try:
                found = run(*pair)
            except UnboundedError:
                continue
            calls += 1
            reason = largest_error(list(function(*pair)), list(found), ROUNDING)[1]
            assert reason is None, f"{names}: {reason}, for {pair}"
            assert all(
                torch.equal(one, other) for one, other in zip(pair, before, strict=True) if not one.isnan().any()
            )
    return calls
