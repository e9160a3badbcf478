"""`--graph onednn` of models with recurrent layers, which Dynamo takes only if it is told to."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from tests.worker.capturing import Plugin, close, installed  # noqa: E402

pytestmark = pytest.mark.torch
SIZE, HIDDEN = 16, 24


class Tagger(nn.Module):
    """A recurrent layer between two others; returns its last states, too."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
        self.layer = layer
        self.last = nn.Linear(width, 5)

    def forward(self, value: Tensor, states: Any = None) -> Any:
        outputs, states = self.layer(self.first(value), states)
        return self.last(outputs), states


LAYERS: dict[str, Any] = {
    "LSTM": lambda: Tagger(nn.LSTM(SIZE, HIDDEN, batch_first=True), HIDDEN),
    "LSTM, deep": lambda: Tagger(nn.LSTM(SIZE, HIDDEN, 2, bidirectional=True, dropout=0.5), 2 * HIDDEN),
    "LSTM, projected": lambda: Tagger(nn.LSTM(SIZE, HIDDEN, proj_size=8), 8),
    "LSTM, no bias": lambda: Tagger(nn.LSTM(SIZE, HIDDEN, bias=False), HIDDEN),
    "GRU": lambda: Tagger(nn.GRU(SIZE, HIDDEN, 2, bidirectional=True), 2 * HIDDEN),
    "RNN": lambda: Tagger(nn.RNN(SIZE, HIDDEN, nonlinearity="relu"), HIDDEN),
}


@pytest.mark.parametrize("name", LAYERS)
def test_they_are_captured_and_agree_with_eager_calls(plugin: Plugin, name: str) -> None:
    model = LAYERS[name]().eval()
    for shape in ((4, 7, SIZE), (2, 9, SIZE)):
        for _ in range(3):
            value = torch.randn(shape)
            close(model(value), plugin.eager(model, value))
    assert plugin.captured() == ["Tagger"] * 2


@pytest.mark.parametrize("name", ["LSTM, deep", "GRU"])
def test_states_go_from_call_to_call(plugin: Plugin, name: str) -> None:
    model = LAYERS[name]().eval()
    states = expected = plugin.eager(model, torch.randn(4, 7, SIZE))[1]
    for _ in range(4):
        value = torch.randn(4, 7, SIZE)
        output, states = model(value, states)
        right, expected = plugin.eager(model, value, expected)
        close((output, states), (right, expected))
    assert plugin.captured() == ["Tagger"]


def changed_in_place(layer: nn.LSTM) -> None:
    layer.weight_hh_l0.mul_(1.5)


def replaced(layer: nn.LSTM) -> None:
    layer.weight_ih_l0 = nn.Parameter(torch.randn_like(layer.weight_ih_l0))


def loaded(layer: nn.LSTM) -> None:
    layer.load_state_dict(nn.LSTM(SIZE, HIDDEN, batch_first=True).state_dict())


def assigned(layer: nn.LSTM) -> None:
    layer.load_state_dict(nn.LSTM(SIZE, HIDDEN, batch_first=True).state_dict(), assign=True)


def given_other_data(layer: nn.LSTM) -> None:
    layer.weight_hh_l0.data = torch.randn_like(layer.weight_hh_l0)


def moved_to_its_list(layer: nn.LSTM) -> None:
    """The layer computes with what is in this list, whatever its parameters are."""
    layer._flat_weights[0] = torch.randn_like(layer._flat_weights[0])


@pytest.mark.parametrize("change", [changed_in_place, replaced, loaded, assigned, given_other_data, moved_to_its_list])
def test_changed_weights_have_their_effect(plugin: Plugin, change: Any) -> None:
    model = LAYERS["LSTM"]().eval()
    for number in range(3):
        for _ in range(3):
            value = torch.randn(4, 7, SIZE)
            close(model(value), plugin.eager(model, value))
        if number == 0:
            assert plugin.captured() == ["Tagger"]
        change(model.layer)


def test_packed_sequences_agree_with_eager_calls(plugin: Plugin) -> None:
    class Packing(Tagger):
        def forward(self, value: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.first(value), lengths, batch_first=True)
            outputs, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
            return self.last(outputs)

    model = Packing(nn.LSTM(SIZE, HIDDEN, batch_first=True), HIDDEN).eval()
    for lengths in ([7, 5, 3, 1], [7, 7, 2, 2]) * 3:
        value = torch.randn(4, 7, SIZE)
        close(model(value, torch.tensor(lengths)), plugin.eager(model, value, torch.tensor(lengths)))


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_with_bf16_the_parts_around_the_layer_are_captured(tmp_path: Path, name: str) -> None:
    with installed(tmp_path, TorchSettings(graph="onednn", precision="bf16")) as plugin:
        model = LAYERS[name]().eval()
        for _ in range(5):
            value = torch.randn(4, 7, SIZE)
            outputs, states = model(value)
            right, expected = plugin.eager(model, value)
            assert outputs.dtype is torch.float32
            close((outputs, states), (right, expected), tolerance=0.05)
        assert "recurrent layers" in plugin.reasons()
        assert plugin.captured() == ["Sequential"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_where_the_model_enters_autocast_around_the_layer_its_parts_are_captured(plugin: Plugin, kind: Any) -> None:
    class Mixed(Tagger):
        def forward(self, value: Tensor, enabled: bool) -> Any:
            value = self.first(value)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                outputs, _ = self.layer(value)
            return self.last(outputs.float()), outputs

    model = Mixed(kind(SIZE, HIDDEN), HIDDEN).eval()
    for enabled in (False, True):
        for _ in range(4):
            value = torch.randn(4, 7, SIZE)
            close(model(value, enabled), plugin.eager(model, value, enabled))
    assert plugin.captured() == ["Mixed", "Sequential"]
    assert "different result" not in plugin.reasons()


def test_a_layer_with_normalized_weights_has_a_reason_that_can_be_understood(plugin: Plugin) -> None:
    """Such a layer replaces a weight in its list at each call."""
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.LSTM(SIZE, HIDDEN), "weight_hh_l0")
    model = Tagger(layer, HIDDEN).eval()
    for _ in range(4):
        value = torch.randn(4, 7, SIZE)
        close(model(value), plugin.eager(model, value))
    assert plugin.captured() == ["Sequential"]
    assert plugin.reasons().startswith("it changes the module's layer")


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_cell_that_begins_with_zeros_is_captured(plugin: Plugin, kind: Any) -> None:
    """It writes to what TorchScript takes for constant: products with zeros."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cell = nn.Linear(SIZE, SIZE), kind(SIZE, HIDDEN)

        def forward(self, value: Tensor) -> Any:
            states = None
            for part in torch.relu(self.first(value)).unbind():
                states = self.cell(part, states)
            return states

    model = Steps().eval()
    for _ in range(4):
        value = torch.randn(3, 4, SIZE)
        close(model(value), plugin.eager(model, value))
    assert plugin.captured() == ["Steps"]
