"""`--graph onednn`: operations that a graph computes by other operations, and interrupted captures."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cpulaunch.worker.graph.onednn import _Fusible  # noqa: E402
from tests.worker.capturing import Plugin, close  # noqa: E402

pytestmark = pytest.mark.torch
ALL = slice(None)
PLUGIN_SETTINGS, COLUMNS = torch.tensor([0, 4, 2, 2]), torch.tensor([1, 0, 5, 5])


class Operations(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def rewritten(module: nn.Module) -> nn.Module:
    """The module with the operations that the graph has instead of its own."""

    class Rewritten(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with _Fusible([]):
                return module(x)

    return Rewritten()


def picked(value: Tensor, index: object, constants: list[Tensor]) -> tuple[Tensor, bool]:
    """The elements as the graph computes them, and whether by a single gather."""
    with Operations() as operations, _Fusible(constants):
        result = value[index]
    return result, "gather" in operations.names


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 3, 5, 7), (1, 5, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_constant_indices_become_one_gather(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = (torch.randn(shape) * 9).to(dtype)
    index = (*[ALL] * (len(shape) - 2), PLUGIN_SETTINGS, COLUMNS)
    result, gathered = picked(value, index, [PLUGIN_SETTINGS, COLUMNS])
    assert gathered
    assert torch.equal(result, value[index])
    assert result.stride() == value[index].stride()


@pytest.mark.parametrize(
    "index",
    [
        (ALL, PLUGIN_SETTINGS, -COLUMNS),
        (ALL, PLUGIN_SETTINGS, COLUMNS[:1]),
        (slice(1, 3), PLUGIN_SETTINGS, COLUMNS),
        (ALL, PLUGIN_SETTINGS, 2),
        (ALL, ALL, COLUMNS),
        (PLUGIN_SETTINGS % 3, ALL, COLUMNS),
        (PLUGIN_SETTINGS % 3, COLUMNS % 5),
        (..., PLUGIN_SETTINGS, COLUMNS),
        (ALL, PLUGIN_SETTINGS[None], COLUMNS[None]),
        PLUGIN_SETTINGS % 3,
    ],
)
def test_other_indices_are_left_to_torch(index: object) -> None:
    value = torch.randn(3, 5, 7)
    parts = index if isinstance(index, tuple) else (index,)
    result, gathered = picked(value, index, [part for part in parts if isinstance(part, Tensor)])
    assert not gathered
    assert torch.equal(result, value[index])


def test_indices_that_are_not_constant_are_left_to_torch() -> None:
    assert not picked(torch.randn(3, 5, 7), (ALL, PLUGIN_SETTINGS, COLUMNS), [PLUGIN_SETTINGS])[1]


class Interaction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("rows", PLUGIN_SETTINGS)
        self.register_buffer("columns", COLUMNS)

    def forward(self, value: Tensor) -> Tensor:
        features = self.layer(value)
        return torch.bmm(features, features.transpose(1, 2))[:, self.rows, self.columns] * 2


def test_a_module_with_constant_indices_is_correct_after_they_change(plugin: Plugin) -> None:
    model = Interaction().eval()
    for _ in range(2):
        for _ in range(3):
            value = torch.randn(3, 6, 16)
            close(model(value), plugin.eager(model, value))
        model.rows.copy_(torch.tensor([5, 3, 1, 0]))
    assert plugin.captured()


def test_an_interrupt_during_a_capture_reaches_the_program(plugin: Plugin, monkeypatch) -> None:
    model, freeze, interrupts = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), torch.jit.freeze, [1]

    def interrupted(traced: object) -> object:
        if interrupts:
            raise KeyboardInterrupt(interrupts.pop())
        return freeze(traced)

    monkeypatch.setattr(torch.jit, "freeze", interrupted)
    fused = torch._C._jit_llga_enabled()
    value = torch.randn(4, 16)
    model(value)  # The first call of a signature is not captured.
    with pytest.raises(KeyboardInterrupt):
        model(value)
    assert torch._C._jit_llga_enabled() == fused
    assert plugin.captured() == []
    for _ in range(3):
        close(model(value), plugin.eager(model, value))
    assert plugin.captured() == ["Sequential"]


ROWS, MASK, PICKED = torch.randn(3, 4), torch.randn(3, 4) > 0, torch.zeros(3, 1, dtype=torch.int64)
BOOLEAN_NUMBERS = {
    "scatter": lambda x: MASK.scatter(1, PICKED, True),
    "scatter of numbers": lambda x: x.scatter(1, PICKED, value=True),
    "torch.scatter": lambda x: torch.scatter(MASK, 1, PICKED, value=False),
    "scatter_": lambda x: torch.zeros_like(MASK).scatter_(1, PICKED, True),
    "masked_fill": lambda x: MASK.masked_fill(x > 0, True),
    "masked_fill of numbers": lambda x: x.masked_fill(MASK, value=False),
    "index_fill": lambda x: MASK.index_fill(1, PICKED[:, 0], True),
    "fill_": lambda x: torch.zeros_like(MASK).fill_(True),
    "full_like": lambda x: torch.full_like(MASK, True),
    "new_full": lambda x: MASK.new_full((3, 4), fill_value=True),
    "full": lambda x: torch.full((3, 4), True),
    "full of no type": lambda x: torch.full((3, 4), True, dtype=None),
    "full of a type": lambda x: torch.full((3, 4), True, dtype=torch.float64),
    "where": lambda x: torch.where(MASK, x > 0, True),
    "where of numbers": lambda x: torch.where(MASK, x, False),
    "where by name": lambda x: torch.where(MASK, input=x, other=True),
    "where of two": lambda x: torch.where(MASK, True, False),
    ">=": lambda x: MASK >= True,
    "lt": lambda x: torch.lt(x, False),
    "==": lambda x: MASK == False,  # noqa: E712
    "eq": lambda x: torch.eq(MASK, other=True),
    "!=": lambda x: x != True,  # noqa: E712
}


@pytest.mark.parametrize("name", BOOLEAN_NUMBERS)
def test_true_and_false_as_numbers_are_captured(name: str) -> None:
    class Boolean(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return BOOLEAN_NUMBERS[name](x), x * 2

    traced = torch.jit.trace(rewritten(Boolean()), ROWS, check_trace=False)
    result, expected = torch.jit.freeze(traced.eval())(ROWS)[0], BOOLEAN_NUMBERS[name](ROWS)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert torch.equal(result, expected)
