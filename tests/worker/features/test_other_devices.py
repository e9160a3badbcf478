"""Modules on other devices than the CPU: made-up GPUs, and torch's device "meta", which computes nothing."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.features import call_modes  # noqa: E402
from cpulaunch.worker.features import module_calls as calls  # noqa: E402
from cpulaunch.worker.features.call_modes import CallModes  # noqa: E402
from cpulaunch.worker.graph import precision  # noqa: E402
from cpulaunch.worker.ledger.signature import Signatures, describe  # noqa: E402
from tests.worker.capturing import PLAIN_CALL, Plugin, installed, plain_calls, python_calls  # noqa: E402

pytestmark = pytest.mark.torch


class Gpu:
    """A GPU that takes as long for a call as its mode says, and a clock. A call has only queued its work when it ends.

    `waits`: the number of times that everything queued was waited for. `captures`: a CUDA graph is being captured.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.now = self.queued = 0.0
        self.ran: list[str] = []
        self.waits = 0
        self.captures = False

    def synchronize(self) -> None:
        assert not self.captures, "CUDA ends the capture with an error"
        self.now, self.queued = self.now + self.queued, 0.0
        self.waits += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Gpu]]:
    def make(**seconds: float) -> Gpu:
        gpu, run = Gpu(seconds), CallModes.run

        def queue(self: Any, mode: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
            gpu.ran.append(mode)
            gpu.now += 1e-6
            gpu.queued += gpu.seconds[mode]
            return run(self, "plain", module, args, kwargs)

        monkeypatch.setattr(CallModes, "run", queue)
        monkeypatch.setattr(calls, "_clock", partial(getattr, gpu, "now"))
        for module in (precision, call_modes):
            monkeypatch.setattr(module, "device_of", lambda module: "cuda")
        monkeypatch.setattr(call_modes, "is_on_cpu", lambda module: False)
        monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.captures)
        return gpu

    return make


def chosen(plugin: Plugin) -> list[str]:
    return [event["mode"] for event in plugin.events("chosen")]


BF16 = TorchSettings(graph="onednn", weights="bf16", precision="bf16")


@pytest.mark.parametrize(("autocast", "plain", "best"), [(1e-3, 3e-3, "autocast"), (3e-3, 1e-3, "plain")])
def test_calls_count_with_what_they_queue(tmp_path: Path, gpu, autocast, plain, best) -> None:
    made = gpu(autocast=autocast, plain=plain)
    with installed(tmp_path, BF16, measured=True) as plugin:
        model = nn.Linear(16, 16).eval()
        for _ in range(3000):
            model(torch.randn(4, 16))
        assert chosen(plugin) == [best]
        waits, ran = made.waits, len(made.ran)
        for _ in range(1000):
            model(torch.randn(4, 16))
        assert sum(mode != best for mode in made.ran[ran:]) < 30
        assert made.waits - waits < 100, "most calls are not waited for"


@pytest.mark.parametrize(("autocast", "plain", "best"), [(1e-3, 3e-3, "autocast"), (3e-3, 1e-3, "plain")])
def test_training_steps_count_with_what_they_queue(tmp_path: Path, gpu, autocast, plain, best) -> None:
    made = gpu(autocast=autocast, plain=plain)
    with installed(tmp_path, BF16, measured=True) as plugin, torch.enable_grad():
        model = nn.Linear(16, 16).train()
        for _ in range(400):
            model(torch.randn(4, 16)).square().mean().backward()
        assert chosen(plugin) == [best]
    assert made.ran[-1] == best


def test_nothing_is_waited_for_while_a_graph_is_captured(tmp_path: Path, gpu) -> None:
    made = gpu(autocast=1e-3, plain=3e-3)
    with installed(tmp_path, BF16, measured=True) as plugin:
        model = nn.Linear(16, 16).eval()
        for _ in range(2):
            model(torch.randn(4, 16))
        made.captures = True
        for _ in range(3):
            model(torch.randn(4, 16))
        assert set(made.ran[-3:]) == {"plain"}
        made.captures = False
        for _ in range(3000):
            model(torch.randn(4, 16))
        assert chosen(plugin) == ["autocast"]


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


def test_calls_elsewhere_cost_as_good_as_nothing(tmp_path: Path) -> None:
    with installed(tmp_path, ALL, measured=True):
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).to("meta").eval()
        x = torch.randn(4, 256, device="meta")
        for _ in range(3):
            model(x)
        costs = python_calls(lambda: model(x))
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


def test_a_module_that_moves_is_measured_anew() -> None:
    signatures = Signatures()
    here, there = (signatures.of((torch.randn(4, 16, device=device),), {}) for device in ("cpu", "meta"))
    assert here != there
    assert [describe(here), describe(there)] == ["float32[4, ≤16]", "meta float32[4, ≤16]"]
