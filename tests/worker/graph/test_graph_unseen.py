"""Changes and values that a captured graph or a packed weight cannot see by itself: each must have its effect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

from torch import Tensor, nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.graph import module_state  # noqa: E402
from cpulaunch.worker.weights.resident import ResidentWeights  # noqa: E402
from tests.worker.capturing import Plugin, close, installed  # noqa: E402

counts_owners = hasattr(torch._C, "_storage_Use_Count")
needs_counts = pytest.mark.skipif(not counts_owners, reason="this torch does not count owners")
pytestmark = pytest.mark.torch


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch) -> Iterator[Plugin]:
    torch.manual_seed(0)
    monkeypatch.setattr(module_state, "FIRST_PAUSE", 0.0)
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        yield plugin


def mlp(size: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size)).eval()


def _flat(model: nn.Sequential) -> Tensor:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(flat, model.parameters())
    return flat


HOLDERS: dict[str, Any] = {"data": lambda model: model[0].weight.data, "a flat buffer": _flat}


@needs_counts
@pytest.mark.parametrize("holder", HOLDERS)
def test_weights_change_through_memory_that_the_program_held_before(plugin: Plugin, holder: str) -> None:
    model, value = mlp(), torch.randn(4, 16)
    held = HOLDERS[holder](model)
    for _ in range(4):
        for _ in range(3):
            close(model(value), plugin.eager(model, value))
        held.mul_(2)
    assert plugin.captured() == []
    assert "holds the memory of its weights" in plugin.reasons()


@needs_counts
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_modules_whose_weights_are_packed_already_are_captured(plugin: Plugin, kind: str) -> None:
    model, value = mlp(128), torch.randn(4, 128)
    store = ResidentWeights(kind, TorchSettings())
    for _ in range(3):
        with torch.no_grad(), store.active(model):
            plugin.eager(model, value)
    assert store.bytes or kind == "fp32"
    for _ in range(3):
        close(model(value), plugin.eager(model, value))
    assert plugin.captured() == ["Sequential"]
    assert "holds the memory of its weights" not in plugin.reasons()


@needs_counts
def test_a_module_is_captured_once_the_program_holds_its_memory_no_more(plugin: Plugin) -> None:
    model, value = mlp(), torch.randn(4, 16)
    held = [parameter.data for parameter in model.parameters()]
    for _ in range(3):
        model(value)
    held.clear()
    for _ in range(3):
        close(model(value), plugin.eager(model, value))
    assert plugin.captured() == ["Sequential"]


class Tied(nn.Module):
    """One weight in two parameters, a weight as a view, and buffers as views of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = nn.Parameter(self.layers[0].weight)
        self.register_buffer("table", torch.ones(32, 16).view(2, 16, 16))
        self.register_buffer("row", self.table[0, :1])

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.layers(value)) + self.row


def test_a_modules_own_ties_do_not_keep_it_from_being_captured(plugin: Plugin) -> None:
    model = Tied().eval()
    for rows in (4, 5):
        for _ in range(3):
            value = torch.randn(rows, 16)
            close(model(value), plugin.eager(model, value))
    assert plugin.captured() == ["Tied"] * 2
    model.table.mul_(3)
    value = torch.randn(4, 16)
    close(model(value), plugin.eager(model, value))


@pytest.mark.parametrize("settings", [TorchSettings(graph="onednn"), TorchSettings(weights="fp32")])
def test_weights_change_through_an_array_that_the_program_took_later(tmp_path: Path, settings: TorchSettings) -> None:
    model, value = mlp(128), torch.randn(2, 128)
    with installed(tmp_path, settings) as plugin:
        for _ in range(4):
            close(model(value), plugin.eager(model, value))
        array = model[0].weight.numpy()
        part = array[:2]
        del array
        for _ in range(4):
            close(model(value), plugin.eager(model, value))
        part *= 3
        close(model(value), plugin.eager(model, value))


def test_forward_derivatives_pass_through_a_captured_module(plugin: Plugin) -> None:
    model, value = mlp(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Sequential"]

    def tangent() -> Tensor | None:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(value, torch.ones_like(value))
            found: Tensor | None = forward_ad.unpack_dual(model(dual)).tangent
            return found

    close(tangent(), plugin.eager(tangent))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_not_lost(plugin: Plugin, odd: float) -> None:
    model, value = mlp(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Sequential"]
    broken = value.clone()
    broken[1, 3] = odd
    torch.testing.assert_close(model(broken), plugin.eager(model, broken), equal_nan=True)
    close(model(value), plugin.eager(model, value))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        return (self.layers(value) + mask).softmax(-1)


def test_infinity_in_a_mask_does_not_keep_graphs_from_being_used(plugin: Plugin, monkeypatch) -> None:
    model, value = Masked().eval(), torch.randn(4, 16)
    mask = torch.zeros(16).index_fill(0, torch.arange(8), -float("inf"))
    for _ in range(4):
        close(model(value, mask), plugin.eager(model, value, mask))
    assert plugin.captured() == ["Masked"]
    monkeypatch.setattr(nn.Module, "_call_impl", None)  # What an eager call would run.
    model(value, mask)


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, value: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(torch.log(value))))


def test_nan_that_comes_of_finite_numbers_is_not_lost(plugin: Plugin) -> None:
    model, value = Logarithm().eval(), torch.rand(4, 16) + 1
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Logarithm"]
    value[1, 3] = -1
    torch.testing.assert_close(model(value), plugin.eager(model, value), equal_nan=True)


class Amplitude(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, value: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(value.abs())))


def test_complex_numbers_that_are_not_finite_are_not_lost(plugin: Plugin) -> None:
    model, value = Amplitude().eval(), torch.randn(4, 16, dtype=torch.complex64)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Amplitude"]
    value[1, 3] = complex(0, float("nan"))
    torch.testing.assert_close(model(value), plugin.eager(model, value), equal_nan=True)


def test_nan_in_an_input_that_held_infinity_is_not_lost(plugin: Plugin) -> None:
    model, value = mlp(), torch.randn(4, 16)
    value[0] = -float("inf")
    model[0].weight.abs_()
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Sequential"]
    value[1, 3] = float("nan")
    torch.testing.assert_close(model(value), plugin.eager(model, value), equal_nan=True)


class MaskedSoftmax(Logarithm):
    def forward(self, value: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(value.masked_fill(value < 0, -float("inf")).softmax(-1))))


class LogarithmInPlace(Logarithm):
    def forward(self, value: Tensor) -> Tensor:
        copy = value * 2
        copy[:, 0].log_()
        return self.second(torch.relu(self.first(copy)))


class Normalized(Logarithm):
    def forward(self, value: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(nn.functional.layer_norm(value, (16,)))))


def test_nan_that_comes_of_huge_numbers_is_not_lost(plugin: Plugin) -> None:
    model, value = Normalized().eval(), torch.rand(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Normalized"]
    value[1] = 1e30
    torch.testing.assert_close(model(value), plugin.eager(model, value), equal_nan=True)


def check_twice(model: nn.Module, value: Tensor) -> None:
    """Raises: AssertionError unless calls give NaN and numbers where eager calls do."""
    for _ in range(2):
        result, expected = model(value), Plugin.eager(model, value)
        largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3 * largest, equal_nan=True)


@pytest.mark.parametrize("size", [1e30, 3e38])
def test_huge_numbers_that_cancel_in_their_sum_are_not_lost(plugin: Plugin, size: float) -> None:
    model, value = mlp(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Sequential"]
    with torch.no_grad():
        value[1, :2] = torch.tensor([size, -size])
    check_twice(model, value)


class Products(Logarithm):
    """Its output is a polynomial of its input of the 64th degree."""

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for _ in range(6):
            value = value * value - value
        return self.second(torch.relu(self.first(value) - self.second(value)))


def test_products_that_overflow_inside_a_graph_are_not_lost(plugin: Plugin) -> None:
    model, value = Products().eval(), torch.rand(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Products"]
    for scale in (10.0, 100.0, 1e4):
        check_twice(model, value * scale)


class Deep(nn.Module):
    """Convolutions whose results are about as large as their input, with activations between them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(layers)])
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=1.75)

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.relu(layer(value))
        return value - 2 * value.mean()


def test_deep_models_are_fused_and_an_overflow_in_them_is_not_lost(plugin: Plugin) -> None:
    model, value = Deep(60).eval(), torch.randn(1, 8, 4, 4)
    with torch.no_grad():
        model.layers[-1].weight.mul_(1e32)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Deep"]
    for scale in (1.0, 1e3):
        check_twice(model, value * scale)
    result, expected = model(value * 1e7), plugin.eager(model, value * 1e7)
    assert expected.isnan().any()
    assert result.isnan().any()  # Not at the same places: the order of a sum decides which infinity it becomes first.


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(16, eps=0.0),
        nn.GroupNorm(2, 16, eps=0.0),
        nn.RMSNorm(16, eps=1e-60),
    ],
)
def test_nan_of_norms_without_an_epsilon_is_not_lost(plugin: Plugin, norm: nn.Module) -> None:
    model, value = nn.Sequential(norm, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Sequential"]
    value[1] = 0.0
    check_twice(model, value)


class Weighting(Logarithm):
    def forward(self, value: Tensor) -> Tensor:
        return torch.sigmoid(self.second(self.first(value)).softmax(-1) * 2.0)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e30])
def test_nan_in_a_row_of_a_softmax_is_not_lost_in_its_other_elements(plugin: Plugin, odd: float) -> None:
    model, value = Weighting().eval(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Weighting"]
    value[1, 2] = odd
    check_twice(model, value)


class Gated(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return torch.sigmoid(value.softmax(-1) * 2.0)


@pytest.mark.parametrize("norm", [Gated(), nn.LayerNorm(16), nn.Hardswish(), nn.Softmax(-1)])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3e38])
def test_numbers_for_which_torchs_own_operations_overflow_give_the_same(plugin: Plugin, norm, odd: float) -> None:
    model, value = nn.Sequential(norm, nn.Linear(16, 16), nn.Tanh(), norm).eval(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    value[1, 2] = odd
    check_twice(model, value)
    value[2] = odd
    check_twice(model, value)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.attention(value, value, value, need_weights=False)[0]


def test_scores_of_attention_that_overflow_are_not_lost(plugin: Plugin) -> None:
    model, value = Attending().eval(), torch.randn(1, 4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Attending"]
    value[0, 1, 2] = 1e30
    check_twice(model, value)


class Deviation(Logarithm):
    def forward(self, value: Tensor) -> Tensor:
        chosen = torch.where(value > 0, value, value[:, :1].std(-1, keepdim=True))
        return self.second(torch.relu(self.first(chosen)))


def test_nan_of_the_deviation_of_one_element_is_not_lost(plugin: Plugin) -> None:
    model, value = Deviation().eval(), torch.rand(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Deviation"]
    value[1, 2] = -1
    check_twice(model, value)


def test_huge_numbers_in_a_mask_do_not_keep_graphs_from_being_used(plugin: Plugin, monkeypatch) -> None:
    model, value, mask = Masked().eval(), torch.randn(4, 16), torch.full((4, 16), torch.finfo(torch.float32).min)
    mask[:, 0] = 0
    for _ in range(6):
        model(value, mask)
    assert plugin.captured() == ["Masked"]
    monkeypatch.setattr(nn.Module, "_call_impl", None)  # What an eager call would run.
    model(value, mask)


@pytest.mark.parametrize("kind", [MaskedSoftmax, LogarithmInPlace])
def test_nan_that_comes_of_a_masked_row_or_by_way_of_a_view_is_not_lost(plugin: Plugin, kind: type) -> None:
    model, value = kind().eval(), torch.rand(4, 16) + 1
    for _ in range(4):
        model(value)
    assert plugin.captured() == [kind.__name__]
    value[1] = -1
    torch.testing.assert_close(model(value), plugin.eager(model, value), equal_nan=True)
