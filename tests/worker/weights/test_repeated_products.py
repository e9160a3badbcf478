"""Products that repeat the last one skip what it has established; nothing that a program changes may be missed."""

import random
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.weights.entry import ResidentWeight  # noqa: E402
from cpulaunch.worker.weights.resident import ResidentWeights  # noqa: E402

pytestmark = pytest.mark.torch

WIDTH, ROWS = 128, 256
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "int8": 4e-2, "int4": 0.25}
SHAPES = ((1, WIDTH), (WIDTH,), (1, 1, WIDTH), (2, WIDTH), (4, WIDTH), (1, 20, WIDTH), (0, WIDTH), (1, WIDTH + 1))


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The products that were repetitions."""
    found: list[Tensor] = []
    plain = ResidentWeight.repeated

    def repeat(self: ResidentWeight, *given: Any) -> Tensor | None:
        y = plain(self, *given)
        if y is not None:
            found.append(y)
        return y

    monkeypatch.setattr(ResidentWeight, "repeated", repeat)
    return found


def change(layer: nn.Linear, weights: ResidentWeights, how: int) -> None:
    """Effect: does what a program, or the plugin, may do to a weight between two products."""
    weight = layer.weight
    if how == 0:
        weight.mul_(-1.5)
    elif how == 1:
        weight.data = torch.randn(ROWS, WIDTH)
    elif how == 2:
        weight.data[3] += 1
    elif how == 3:
        layer.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
    elif how == 4:
        weights.free(layer)
    else:
        layer.to(torch.bfloat16 if weight.dtype is torch.float32 else torch.float32)


def outcome(call: Any) -> Tensor | str:
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__


@pytest.mark.parametrize("kind", TOLERANCES)
def test_products_in_any_order_are_torchs(kind: str, repeated: list[Tensor]) -> None:
    torch.manual_seed(0)
    chance = random.Random(kind)
    weights = ResidentWeights(kind, TorchSettings())
    layer = nn.Linear(WIDTH, ROWS).eval()
    shape, dtype, autocast = SHAPES[0], torch.float32, False
    repetitions = 0
    for _ in range(600):
        if chance.random() < 0.2:
            shape = chance.choice(SHAPES)
        if chance.random() < 0.05:
            dtype = chance.choice((torch.float32, torch.bfloat16))
        if chance.random() < 0.1:
            autocast = not autocast
        with torch.no_grad():
            if chance.random() < 0.03:
                change(layer, weights, chance.randrange(6))
            x = torch.randn(shape).to(dtype)
            if x.dim() == 2 and chance.random() < 0.2:
                x = torch.randn(shape[::-1]).to(dtype).t()
            bias = layer.bias if chance.random() < 0.2 else None
            before = len(repeated)
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                expected = outcome(lambda: functional.linear(x, layer.weight, bias))  # noqa: B023  Called at once.
                with weights.active(layer):
                    got = outcome(lambda: functional.linear(x, layer.weight, bias))  # noqa: B023
        if isinstance(expected, str) or isinstance(got, str):
            assert got == expected
            continue
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        if len(repeated) > before:
            repetitions += 1
        if got.numel():
            error = (got.float() - expected.float()).norm() / expected.float().norm()
            assert float(error) <= max(TOLERANCES[kind], 2e-2 if got.dtype is torch.bfloat16 else 0)
    assert repetitions > 100


def test_a_repetition_has_the_bits_of_the_first(repeated: list[Tensor]) -> None:
    torch.manual_seed(0)
    weights, layer, x = (
        ResidentWeights("int8", TorchSettings()),
        nn.Linear(WIDTH, ROWS, bias=False),
        torch.randn(1, WIDTH),
    )
    with torch.no_grad(), weights.active(layer):
        results = [functional.linear(x, layer.weight) for _ in range(5)]
    assert len(repeated) == 2  # After torch's own, that with which the form is made, and the first with the form.
    assert all(torch.equal(result, results[2]) for result in results[2:])
