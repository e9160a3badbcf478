"""Modules on other devices than the CPU: here torch's device "meta", which computes nothing."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.features import call_modes  # noqa: E402
from cpulaunch.worker.features.call_modes import CallModes  # noqa: E402
from cpulaunch.worker.graph import cache, precision  # noqa: E402
from cpulaunch.worker.ledger.signature import Signatures, describe  # noqa: E402
from tests.worker.capturing import PLAIN_CALL, installed, plain_calls, python_calls  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("by_level", "mode"), [(True, "plain"), (False, "autocast")])
def test_autocast_elsewhere_is_for_who_asks_for_it(monkeypatch, by_level: bool, mode: str) -> None:
    """Whether it pays is not measured there: a call ends before its work does."""
    settings = TorchSettings(graph="onednn", weights="bf16", precision="bf16", level_precision=by_level)
    modes, model = CallModes(settings, PLAIN_CALL, None), nn.Linear(256, 256).eval()
    with torch.no_grad():
        assert modes.candidates(model) == ("graph", "weights", "autocast", "plain")
        move_to_a_gpu(monkeypatch)
        assert modes.candidates(model) == (mode,)


def move_to_a_gpu(monkeypatch) -> None:
    """Effect: all modules seem to be on a GPU."""
    for module in (precision, call_modes):
        monkeypatch.setattr(module, "device_of", lambda module: "cuda")
    for module in (precision, cache):
        monkeypatch.setattr(module, "is_on_cpu", lambda module: False)


def test_a_model_whose_first_call_was_on_the_cpu_is_left_alone_once_it_has_moved(tmp_path: Path, monkeypatch) -> None:
    settings = TorchSettings(graph="onednn", weights="bf16", precision="bf16", level_precision=True)
    ran, run = [], CallModes.run
    monkeypatch.setattr(CallModes, "run", lambda self, mode, *given: (ran.append(mode), run(self, mode, *given))[1])
    with installed(tmp_path, settings, measured=True), torch.no_grad():
        model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).eval(), torch.randn(4, 256)
        model(x)
        model(x)
        assert ran[-1] != "plain"
        ran.clear()
        move_to_a_gpu(monkeypatch)
        for _ in range(20):
            model(x)
    assert set(ran) == {"plain"}


def test_an_error_of_dtypes_on_a_gpu_is_the_programs(monkeypatch) -> None:
    """Levels do not repeat such a call in autocast."""

    def fails(module, *args):
        raise RuntimeError("mat1 and mat2 must have the same dtype, but got Half and Float")

    modes = CallModes(TorchSettings(precision="bf16", level_precision=True), fails, type("State", (), {})())
    modes._state.unwrapped = False
    move_to_a_gpu(monkeypatch)
    module = nn.Linear(4, 4).eval()
    with pytest.raises(RuntimeError, match="mat1"):
        modes.run("plain", module, (torch.randn(2, 4, dtype=torch.half),), {})
    assert modes._only(module) is None


ALL = TorchSettings(graph="onednn", weights="fp32", channels_last=True)


class HalfElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(256, 256)
        self.head = nn.Linear(256, 8, device="meta")

    def forward(self, x):
        return self.head(self.table(x).to("meta"))


def test_no_graphs_are_tried_where_a_part_is_elsewhere() -> None:
    modes = CallModes(ALL, PLAIN_CALL, None)
    with torch.no_grad():
        assert modes.candidates(nn.Linear(256, 256).eval())[0] == "graph"
        assert modes.candidates(nn.Linear(256, 256, device="meta").eval()) == ("plain",)
        assert modes.candidates(HalfElsewhere().eval()) == ("weights", "plain")
    by_level = TorchSettings(weights="bf16", precision="bf16", level_precision=True)
    with torch.no_grad():
        assert CallModes(by_level, PLAIN_CALL, None).candidates(HalfElsewhere().eval()) == ("weights", "plain")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x):
        return x if x.is_meta else self.layer(x)


@pytest.mark.parametrize("calls_before", [0, 1, 3])
@pytest.mark.parametrize("training", [False, True])
def test_calls_elsewhere_cost_as_good_as_nothing(tmp_path: Path, calls_before: int, training: bool) -> None:
    """Also of a model that a program has tried on the CPU."""
    settings = TorchSettings(graph="onednn", weights="bf16", precision="bf16", level_precision=True)
    with installed(tmp_path, settings, measured=True), torch.set_grad_enabled(training):
        model = Small().train(training)
        for _ in range(calls_before):
            model(torch.randn(4, 256))
        model.to("meta")
        x = torch.randn(4, 256, device="meta")
        for _ in range(5):
            model(x)
        costs = min(python_calls(lambda: model(x)) for _ in range(5))
        with plain_calls():
            plain = python_calls(lambda: model(x))
        assert costs <= plain + 1


def test_weights_elsewhere_stay_where_they_are(tmp_path: Path) -> None:
    """A CUDA graph, or a kernel of another stream, may read their memory."""
    with installed(tmp_path, TorchSettings(channels_last=True), measured=False) as plugin:
        for device in ("cpu", "meta"):
            model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(device).eval()
            model(torch.randn(1, 8, 9, 9, device=device))
            assert model[0].weight.is_contiguous() is (device == "meta")
        assert len(plugin.events("applied")) == 1


def test_weights_that_have_moved_get_their_own_layout_back(tmp_path: Path) -> None:
    """A program that flattens its parameters needs them as views."""
    with installed(tmp_path, TorchSettings(channels_last=True), measured=False):
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
        model(torch.randn(1, 8, 9, 9))
        assert not model[0].weight.is_contiguous()
        model.to("meta")
        model.register_forward_hook(lambda *given: None)
        assert not model[0].weight.is_contiguous()  # A CUDA graph may read its memory.
        assert nn.utils.parameters_to_vector(model.parameters()).shape == (584,)


@pytest.mark.parametrize("calls_elsewhere", [0, 3])
def test_weights_that_come_back_get_their_own_layout_back(tmp_path: Path, calls_elsewhere: int) -> None:
    class Pooled(nn.Conv2d):
        is_pooled = True

        def forward(self, x):
            return super().forward(x).mean((2, 3)) if self.is_pooled else super().forward(x)

    with installed(tmp_path, TorchSettings(channels_last=True), measured=False):
        model, x = Pooled(8, 8, 3).eval(), torch.randn(1, 8, 9, 9)
        model(x)
        assert not model.weight.is_contiguous()
        model.to("meta")
        model.register_forward_hook(lambda *given: None)
        for _ in range(calls_elsewhere):
            model(x.to("meta"))
        model.to_empty(device="cpu")
        model.is_pooled = False
        result = model(x)
    assert model.weight.is_contiguous()
    assert result.is_contiguous()


def test_what_a_model_elsewhere_keeps_between_calls_is_not_looked_for() -> None:
    modes = CallModes(TorchSettings(precision="bf16"), PLAIN_CALL, None)
    x = torch.randn(4, 256)
    assert modes.needs_care(nn.Linear(256, 256).eval(), (x,), {})
    assert not modes.needs_care(nn.Linear(256, 256, device="meta").eval(), (x,), {})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_results_of_a_module_without_weights_stay_in_the_programs_type(tmp_path: Path, device: str) -> None:
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True), torch.no_grad():
        model, x = Attention().eval(), torch.randn(2, 16, 16, device=device, dtype=torch.bfloat16)
        assert {model(x, x, x).dtype for _ in range(30)} == {torch.bfloat16}


def test_a_module_that_moves_is_measured_anew() -> None:
    signatures = Signatures()
    here, there = (signatures.of((torch.randn(4, 16, device=device),), {}) for device in ("cpu", "meta"))
    assert here != there
    assert [describe(here), describe(there)] == ["float32[4, ≤16]", "meta float32[4, ≤16]"]
