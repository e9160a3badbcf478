"""Products that repeat the last one skip what it has established; nothing that a program changes may be missed."""

import random
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.weights import functions  # noqa: E402
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


def resident(kind: str) -> tuple[ResidentWeights, nn.Linear]:
    return ResidentWeights(kind, TorchSettings()), nn.Linear(WIDTH, ROWS, bias=False)


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
    (weights, layer), x = resident("int8"), torch.randn(1, WIDTH)
    with torch.no_grad(), weights.active(layer):
        results = [functional.linear(x, layer.weight) for _ in range(5)]
    assert len(repeated) == 2  # After torch's own, that with which the form is made, and the first with the form.
    assert all(torch.equal(result, results[2]) for result in results[2:])


@pytest.mark.parametrize("at", ["note_product", "accepts"])
def test_a_weight_that_changes_during_a_product_is_noticed(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread or a signal handler may do: it writes the weight, and multiplies with it."""
    torch.manual_seed(0)
    (weights, layer), x = resident("bf16"), torch.randn(1, WIDTH)
    plain = getattr(ResidentWeight, at)
    to_change = [True]

    def interrupted(self: ResidentWeight, *given: Any, **options: Any) -> Any:
        if self.form is not None and to_change:
            to_change.clear()
            layer.weight.copy_(torch.randn(ROWS, WIDTH))
            weights.linear(x, layer.weight, None, transposed=False)
        return plain(self, *given, **options)

    monkeypatch.setattr(ResidentWeight, at, interrupted)
    with torch.no_grad(), weights.active(layer):
        for _ in range(8):
            got = functional.linear(x, layer.weight)
        expected = functions.plain_linear(x, layer.weight)
    assert not to_change
    assert float((got - expected).norm() / expected.norm()) < TOLERANCES["bf16"]


def test_a_freed_form_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may free it between the look at a product and the note of it."""
    (weights, layer), x = resident("int8"), torch.randn(1, WIDTH)
    plain = ResidentWeight.note_product

    def freed(self: ResidentWeight, *given: Any) -> None:
        weights.free(layer)
        plain(self, *given)

    with torch.no_grad(), weights.active(layer):
        for _ in range(2):
            functional.linear(x, layer.weight)
        monkeypatch.setattr(ResidentWeight, "note_product", freed)
        functional.linear(x, layer.weight)
        entry = weights._weights[id(layer.weight)]
        assert entry is not None
        assert entry.form is None
        assert entry.repeated(x, layer.weight, None) is None


@pytest.mark.parametrize("shape", [(WIDTH,), (1, ROWS, WIDTH)])
def test_a_weight_of_another_number_of_dimensions_is_torchs(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    (weights, layer), x = resident("bf16"), torch.randn(1, WIDTH)
    with torch.no_grad():
        for changed in (None, torch.randn(shape), torch.randn(ROWS, WIDTH)):
            if changed is not None:
                layer.weight.set_(changed)
            for _ in range(4):
                expected = outcome(lambda: functions.plain_linear(x, layer.weight))
                with weights.active(layer):
                    got = outcome(lambda: functional.linear(x, layer.weight))
                if isinstance(expected, str):
                    assert got == expected
                else:
                    assert got.shape == expected.shape  # type: ignore[union-attr]
                    assert float((got - expected).norm() / expected.norm()) < TOLERANCES["bf16"]


def test_zeros_without_memory_and_other_types_of_autocast_are_torchs() -> None:
    weights, layer = resident("bf16")
    x = torch.randn(1, WIDTH)
    before = torch.get_autocast_dtype("cpu")
    with torch.no_grad(), weights.active(layer):
        for _ in range(3):
            functional.linear(x, layer.weight)
        assert not functional.linear(torch._efficientzerotensor((1, WIDTH)), layer.weight).any()
        try:
            with torch.autocast("cpu"):
                torch.set_autocast_dtype("cpu", torch.float64)
                expected = outcome(lambda: functions.plain_linear(x, layer.weight))
                got = outcome(lambda: functional.linear(x, layer.weight))
        finally:
            torch.set_autocast_dtype("cpu", before)
    assert isinstance(expected, Tensor)
    assert isinstance(got, Tensor)
    assert got.dtype is expected.dtype
