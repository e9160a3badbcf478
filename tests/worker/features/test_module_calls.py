"""What happens around outermost calls: precision, gradients, memory order, the first call, compiled engines."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.features import module_calls as calls  # noqa: E402
from tests.worker.capturing import PLAIN_CALL, close, installed  # noqa: E402

pytestmark = pytest.mark.torch


class Telling(nn.Module):
    """A layer that tells in which type its product came out, and whether gradients were on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, value: Tensor) -> dict[str, Tensor]:
        result = self.layer(value)
        self.seen.append((result.dtype, torch.is_grad_enabled()))
        return {"result": result, "index": result.argmax(-1)}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_low_precision_inside_and_the_callers_type_outside(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = Telling()
    with installed(tmp_path, TorchSettings(precision=name)):
        result = model(torch.randn(4, 16))
    assert model.seen == [(dtype, False)]
    assert result["result"].dtype is torch.float32
    assert result["index"].dtype is torch.int64


def test_training_in_bf16_keeps_fp32_weights_and_gradients(tmp_path: Path) -> None:
    model = Telling().train()
    with installed(tmp_path, TorchSettings(precision="bf16")), torch.enable_grad():
        result = model(torch.randn(4, 16))["result"]
        nn.MSELoss()(result, torch.zeros(4, 16)).backward()
    assert model.seen == [(torch.bfloat16, True)]
    assert model.layer.weight.grad.dtype is torch.float32


def test_the_programs_own_autocast_and_types_win(tmp_path: Path) -> None:
    model, low = Telling(), Telling().to(torch.bfloat16)
    with installed(tmp_path, TorchSettings(precision="fp16")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(torch.randn(4, 16))["result"].dtype is torch.bfloat16
        assert low(torch.randn(4, 16, dtype=torch.bfloat16))["result"].dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            model(torch.randn(4, 16))


def test_autocast_of_the_program_is_restored(tmp_path: Path) -> None:
    with installed(tmp_path, TorchSettings(precision="bf16")):
        Telling()(torch.randn(4, 16))
        assert not torch.is_autocast_enabled("cpu")


def test_inference_mode_turns_gradients_off_in_eval_mode_only(tmp_path: Path) -> None:
    model = Telling()
    with installed(tmp_path, TorchSettings(inference_mode=True)), torch.enable_grad():
        assert model.train()(torch.randn(4, 16))["result"].requires_grad
        assert not model.eval()(torch.randn(4, 16))["result"].requires_grad
        assert torch.is_grad_enabled()


def test_inference_mode_lets_modules_be_captured(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    with installed(tmp_path, TorchSettings(graph="onednn", inference_mode=True)) as plugin, torch.enable_grad():
        for _ in range(3):
            value = torch.randn(4, 16)
            close(model(value), plugin.eager(model, value).detach())
        assert plugin.captured() == ["Sequential"]


class Images(nn.Module):
    def __init__(self, *, viewing: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.viewing = viewing

    def forward(self, value: Tensor) -> Tensor:
        result = self.convolution(value)
        return result.view(result.shape[0], -1) if self.viewing else result.flatten(1)


def test_channels_last_reorders_weights_not_results(tmp_path: Path) -> None:
    model, value = Images(viewing=False).eval(), torch.randn(2, 3, 8, 8)
    with installed(tmp_path, TorchSettings(channels_last=True)) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(2):
            close(model(value), expected)
        assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        assert [event["detail"] for event in plugin.events("applied")] == ["Images"]


def test_a_model_that_cannot_be_channels_last_gets_its_order_back(tmp_path: Path, capfd) -> None:
    model, value = Images(viewing=True).eval(), torch.randn(2, 3, 8, 8)
    with installed(tmp_path, TorchSettings(channels_last=True)) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(2):
            close(model(value), expected)
        assert model.convolution.weight.is_contiguous()
    assert capfd.readouterr().err.count("--channels-last: Images does not support channels_last") == 1


def test_the_first_outermost_call_is_waited_for_once() -> None:
    waited: list[int] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    calls.install(TorchSettings(), first_call=lambda: waited.append(1))
    try:
        for _ in range(3):
            model(torch.randn(2, 4))
    finally:
        nn.Module.__call__ = PLAIN_CALL
    assert waited == [1]


def test_threads_have_their_own_place(tmp_path: Path) -> None:
    model = Telling()
    with installed(tmp_path, TorchSettings(precision="bf16")):
        threads = [threading.Thread(target=model, args=(torch.randn(4, 16),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [dtype for dtype, _ in model.seen] == [torch.bfloat16] * 4


# Faults: whatever fails inside, the program goes on as without the setting; --strict ends it.


def _fail(*arguments: object, **options: object) -> None:
    raise RuntimeError("injected")


FAULTS = {
    "trace": (torch.jit, "trace"),
    "freeze": (torch.jit, "freeze"),
    "compile": (torch, "compile"),
    "fusion": (torch._C, "_jit_set_llga_enabled"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_capture_leaves_the_program_alone(tmp_path: Path, name: str, monkeypatch, capfd) -> None:
    model, value = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), torch.randn(4, 16)
    monkeypatch.setattr(*FAULTS[name], _fail)
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(3):
            close(model(value), expected)
        assert "injected" in plugin.reasons()
    assert capfd.readouterr().err.count("injected") == 1


class Lying(nn.Module):
    """Computes something else when it is traced, as a fused graph with a defect would."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value)


def test_a_graph_that_computes_something_else_is_not_used(tmp_path: Path, monkeypatch, capfd) -> None:
    model, value = Lying().eval(), torch.randn(4, 16)
    freeze: Callable[..., nn.Module] = torch.jit.freeze

    class Wrong:
        def __init__(self, right: nn.Module) -> None:
            self.right, self.graph = right, right.graph

        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(output + 1 for output in self.right(*inputs))

    monkeypatch.setattr(torch.jit, "freeze", lambda traced: Wrong(freeze(traced)))
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(3):
            close(model(value), expected)
        assert plugin.captured() == []
    assert "Lying runs eagerly: the captured graph gives a different result" in capfd.readouterr().err


def test_a_graph_that_fails_later_is_given_up(tmp_path: Path, monkeypatch, capfd) -> None:
    model, freeze, failing = nn.Sequential(nn.Linear(16, 16)).eval(), torch.jit.freeze, []

    class Breaking:
        def __init__(self, right: nn.Module) -> None:
            self.right, self.graph = right, right.graph

        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            if failing:
                raise RuntimeError("vector::_M_range_check")
            return self.right(*inputs)

    monkeypatch.setattr(torch.jit, "freeze", lambda traced: Breaking(freeze(traced)))
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        for broken in (False, False, True, True):
            failing[:] = [1] * broken
            value = torch.randn(4, 16)
            close(model(value), plugin.eager(model, value))
        assert "the captured graph failed: vector::_M_range_check" in plugin.reasons()
    assert capfd.readouterr().err.count("runs eagerly") == 1
