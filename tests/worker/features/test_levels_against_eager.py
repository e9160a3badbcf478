"""What `-O4` and `--inference-mode` set, together, against eager execution: random models, inputs and changes.

Every call of a program is compared with the same call without the plugin: values within what the types allow, and
exactly what does not depend on them: structure, types, shapes, gradients, NaN, the state of the random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from tests.worker.capturing import Plugin, installed  # noqa: E402

pytestmark = pytest.mark.torch

LEVEL_4 = TorchSettings(graph="onednn", weights="int8", channels_last=True)
"""On a CPU without bf16 instructions."""
SETTINGS = {
    "O4": (LEVEL_4, 0.05),
    "O4 and inference mode": (
        TorchSettings(graph="onednn", weights="int8", channels_last=True, inference_mode=True),
        0.05,
    ),
    "inference mode": (TorchSettings(inference_mode=True), 1e-6),
}


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Tensor) -> Tensor:
        return value + self.inner(value)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        rows = value.unflatten(0, (1, -1))
        return self.inner(rows, rows, rows, need_weights=False)[0].squeeze(0)


class Several(nn.Module):
    """A model whose result has a structure."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        result = self.inner(value) * scale
        return {
            "last": result,
            "best": result.argmax(-1),
            "shape": tuple(result.shape),
            "again": (result, [result.sum()]),
        }


PARTS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(32, 32),
    nn.ReLU,
    nn.GELU,
    nn.Tanh,
    lambda: nn.LayerNorm(32),
    lambda: nn.Dropout(0.3),
    lambda: Residual(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))),
    Attention,
]


def dense(numbers: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    parts = [numbers.choice(PARTS)() for _ in range(numbers.randint(2, 6))]
    return Several(nn.Sequential(nn.Linear(32, 32), *parts)), (numbers.choice((1, 3, 16)), 32)


def images(numbers: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    groups = numbers.choice((1, 4))
    parts: list[nn.Module] = [nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    parts += [nn.Conv2d(8, 8, numbers.choice((1, 3)), groups=groups), nn.Hardswish(), nn.MaxPool2d(2)]
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    return Several(nn.Sequential(*parts)), (numbers.choice((1, 2)), 4, 12, 12)


def change(model: nn.Module, numbers: random.Random) -> None:
    """Effect: what a program may do to a model between calls."""
    weights = list(model.parameters())
    weight = numbers.choice(weights)
    with torch.no_grad():
        kind = numbers.randrange(7)
        if kind == 0:
            weight.mul_(1.5)
        elif kind == 1:
            weight.data = weight.detach() + 0.1
        elif kind == 2:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        elif kind == 3:
            model.train(not model.training)
        elif kind == 4:
            model.inner[0].register_forward_hook(lambda part, given, result: result * 2)
        elif kind == 5:
            for each in weights:
                each.requires_grad_(not each.requires_grad)


def same(result: Any, expected: Any, tolerance: float) -> None:
    """Raises: AssertionError unless both have the same structure, and values that differ no more than that."""
    assert type(result) is type(expected)
    if isinstance(result, dict):
        assert list(result) == list(expected)
        for key in result:
            if key != "best":
                same(result[key], expected[key], tolerance)
    elif isinstance(result, tuple | list):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            same(one, other, tolerance)
    elif isinstance(result, Tensor):
        assert (result.dtype, result.shape, result.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(result.isnan(), expected.isnan())
        finite = expected.isfinite()
        assert torch.equal(finite, result.isfinite())
        if finite.any():
            scale = max(1.0, expected[finite].abs().max().item()) * max(1, result.numel() if result.dim() == 0 else 1)
            assert (result - expected)[finite].abs().max().item() <= tolerance * scale
    else:
        assert result == expected


def odd(value: Tensor, numbers: random.Random) -> Tensor:
    """The value, sometimes with numbers in it that are not finite or huge."""
    if numbers.random() < 0.15:
        value = value.clone()
        value.view(-1)[numbers.randrange(value.numel())] = numbers.choice((float("nan"), float("inf"), 1e30))
    return value


@pytest.mark.slow
@pytest.mark.parametrize("build", [dense, images])
@pytest.mark.parametrize(("name", "seed"), [*((name, 0) for name in SETTINGS), ("O4", 1), ("O4", 2)])
def test_calls_give_what_eager_calls_give(tmp_path: Path, name: str, build: Any, seed: int) -> None:
    settings, tolerance = SETTINGS[name]
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    model, shape = build(numbers)
    model.eval()
    with installed(tmp_path, settings) as plugin:
        for step in range(24):
            if step > 6 and numbers.random() < 0.25:
                change(model, numbers)
            value = odd(torch.randn(shape), numbers)
            scale = numbers.choice((1.0, 1.0, 0.5))
            with torch.set_grad_enabled(numbers.random() < 0.2):
                compare(plugin, model, value, scale, tolerance, keeps_gradients=not settings.inference_mode)


def compare(
    plugin: Plugin, model: nn.Module, value: Tensor, scale: float, tolerance: float, *, keeps_gradients: bool
) -> None:
    """Raises: AssertionError unless a call gives what an eager one does."""
    before, copy = torch.get_rng_state(), value.clone()
    buffers = [each.clone() for each in model.buffers()]
    result = model(value, scale=scale)
    after = torch.get_rng_state()
    changed = [each.clone() for each in model.buffers()]
    for buffer, old in zip(model.buffers(), buffers, strict=True):
        buffer.data.copy_(old)
    torch.set_rng_state(before)
    expected = plugin.eager(model, value, scale=scale)
    assert torch.equal(after, torch.get_rng_state())
    assert torch.equal(value.nan_to_num(), copy.nan_to_num())
    same(result, expected, tolerance)
    for one, other in zip(changed, model.buffers(), strict=True):
        same(one, other, tolerance)
    if keeps_gradients or model.training:
        assert result["last"].requires_grad == expected["last"].requires_grad
