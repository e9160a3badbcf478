"""Settings applied around top-level calls: precision, gradients, memory layout, the first call, compiled engines."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.features import module_calls as calls  # noqa: E402
from cpulaunch.worker.graph import capture  # noqa: E402
from tests.worker.capturing import PLAIN_CALL, close, installed  # noqa: E402

pytestmark = pytest.mark.torch


class Recording(nn.Module):
    """A layer that records the type of its product and whether gradients were enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, value: Tensor) -> dict[str, Tensor]:
        result = self.layer(value)
        self.seen.append((result.dtype, torch.is_grad_enabled()))
        return {"result": result, "index": result.argmax(-1)}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_call_computes_in_low_precision_and_returns_fp32(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = Recording()
    with installed(tmp_path, TorchSettings(precision=name)):
        result = model(torch.randn(4, 16))
    assert model.seen == [(dtype, False)]
    assert result["result"].dtype is torch.float32
    assert result["index"].dtype is torch.int64


def test_training_in_bf16_keeps_fp32_weights_and_gradients(tmp_path: Path) -> None:
    model = Recording().train()
    with installed(tmp_path, TorchSettings(precision="bf16")), torch.enable_grad():
        result = model(torch.randn(4, 16))["result"]
        nn.MSELoss()(result, torch.zeros(4, 16)).backward()
    assert model.seen == [(torch.bfloat16, True)]
    assert model.layer.weight.grad.dtype is torch.float32


def test_autocast_and_types_chosen_by_the_program_take_precedence(tmp_path: Path) -> None:
    model, low = Recording(), Recording().to(torch.bfloat16)
    with installed(tmp_path, TorchSettings(precision="fp16")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(torch.randn(4, 16))["result"].dtype is torch.bfloat16
        assert low(torch.randn(4, 16, dtype=torch.bfloat16))["result"].dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            model(torch.randn(4, 16))


def test_autocast_of_the_program_is_restored(tmp_path: Path) -> None:
    with installed(tmp_path, TorchSettings(precision="bf16")):
        Recording()(torch.randn(4, 16))
        assert not torch.is_autocast_enabled("cpu")


def test_inference_mode_turns_gradients_off_in_eval_mode_only(tmp_path: Path) -> None:
    model = Recording()
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


class Checkpointed(nn.Module):
    """Computes its norm, which stays in eval mode, again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.use_reentrant = nn.Linear(16, 16), nn.BatchNorm1d(16), use_reentrant

    def train(self, mode: bool = True) -> "Checkpointed":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, value: Tensor) -> Tensor:
        return checkpoint(lambda inner: self.norm(self.layer(inner)).exp(), value, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inference_mode_leaves_calls_in_the_backward_pass_their_gradients(tmp_path: Path, use_reentrant: bool) -> None:
    model, value = Checkpointed(use_reentrant).train(), torch.randn(4, 16, requires_grad=True)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with torch.enable_grad():
            model(value).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    with installed(tmp_path, TorchSettings(inference_mode=True)) as plugin:
        close(gradients(), plugin.eager(gradients))


def test_first_call_runs_once_before_the_first_top_level_call() -> None:
    ran: list[int] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    calls.install(TorchSettings(), first_call=lambda: ran.append(1))
    try:
        for _ in range(3):
            model(torch.randn(2, 4))
    finally:
        nn.Module.__call__ = PLAIN_CALL
    assert ran == [1]


def test_threads_have_their_own_state(tmp_path: Path) -> None:
    model = Recording()
    with installed(tmp_path, TorchSettings(precision="bf16")):
        threads = [threading.Thread(target=model, args=(torch.randn(4, 16),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [dtype for dtype, _ in model.seen] == [torch.bfloat16] * 4


class Calling(nn.Module):
    """Calls a part of it to find its parameters, as a signal handler or a destructor may do at any place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        self.layer(torch.zeros(1, 256))
        return super().parameters(recurse)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value)


def test_a_call_in_the_midst_of_the_wrapper_is_the_programs_own(tmp_path: Path) -> None:
    model = Calling().eval()
    with installed(tmp_path, TorchSettings(weights="fp32")) as plugin:
        for _ in range(4):
            value = torch.randn(1, 256)
            close(model(value), plugin.eager(model, value))
        assert plugin.events("weights")


class Modeless(nn.Module):
    """A module of which no one can tell whether it is in training mode."""

    @property
    def training(self) -> bool:
        raise RuntimeError("unknown")

    @training.setter
    def training(self, value: bool) -> None:
        pass

    def forward(self, value: Tensor) -> Tensor:
        return value


@pytest.mark.parametrize(
    "settings",
    [TorchSettings(graph="onednn"), TorchSettings(inference_mode=True), TorchSettings(channels_last=True)],
    ids=["graph", "inference mode", "channels_last"],
)
def test_modules_without_a_training_mode_run_as_they_are(tmp_path: Path, settings: TorchSettings) -> None:
    """torch.jit.freeze takes the attribute away."""
    frozen, value = torch.jit.freeze(torch.jit.script(nn.Linear(16, 16).eval())), torch.randn(4, 16)
    assert not hasattr(frozen, "training")
    odd, deleted = nn.Identity(), nn.Identity()
    odd.training = []  # type: ignore[assignment]
    del deleted.training
    with installed(tmp_path, settings, measured=True) as plugin:
        for _ in range(4):
            close(frozen(value), plugin.eager(frozen, value))
            assert all(module(value) is value for module in (Modeless(), odd, deleted))


def test_an_interrupt_at_the_end_of_a_call_does_not_switch_the_wrapper_off(tmp_path: Path) -> None:
    """KeyboardInterrupt is raised where a Python function begins: an `__exit__` may so be left out."""

    def interrupt(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_name == "__exit__" and code.co_filename.endswith("call_modes.py"):
            raise KeyboardInterrupt

    model = Recording()
    with installed(tmp_path, TorchSettings(precision="bf16")):
        try:
            sys.setprofile(interrupt)
            model(torch.randn(4, 16))
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        model(torch.randn(4, 16))
    assert model.seen[-1] == (torch.bfloat16, False)


# Faults: after any failure the program continues as without the setting; --strict stops it.


def _fail(*arguments: object, **options: object) -> None:
    raise RuntimeError("injected")


FAULTS = {
    "trace": (torch.jit, "trace"),
    "freeze": (torch.jit, "freeze"),
    "compile": (torch, "compile"),
    "fusion": (torch._C, "_jit_set_llga_enabled"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_capture_does_not_stop_the_program(tmp_path: Path, name: str, monkeypatch, capfd) -> None:
    model, value = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), torch.randn(4, 16)
    monkeypatch.setattr(*FAULTS[name], _fail)
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(3):
            close(model(value), expected)
        assert "injected" in plugin.reasons()
    assert capfd.readouterr().err.count("injected") == 1


class Defective(nn.Module):
    """A module whose captured graph is made to give a different result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value)


def test_a_graph_with_a_different_result_is_not_used(tmp_path: Path, monkeypatch, capfd) -> None:
    model, value, compile_graph = Defective().eval(), torch.randn(4, 16), capture.compile_graph

    def wrong(*arguments: object) -> Callable[..., tuple[Tensor, ...]]:
        function = compile_graph(*arguments)
        return lambda *inputs: tuple(output + 1 for output in function(*inputs))

    monkeypatch.setattr(capture, "compile_graph", wrong)
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(3):
            close(model(value), expected)
        assert plugin.captured() == []
    assert "Defective runs eagerly: the captured graph gives a different result" in capfd.readouterr().err


def test_a_graph_that_fails_later_is_no_longer_used(tmp_path: Path, monkeypatch, capfd) -> None:
    model, compile_graph, failing = nn.Sequential(nn.Linear(16, 16)).eval(), capture.compile_graph, []

    def breaking(*arguments: object) -> Callable[..., tuple[Tensor, ...]]:
        function = compile_graph(*arguments)

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            if failing:
                raise RuntimeError("vector::_M_range_check")
            return function(*inputs)

        return run

    monkeypatch.setattr(capture, "compile_graph", breaking)
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        for broken in (False, False, True, True):
            failing[:] = [1] * broken
            value = torch.randn(4, 16)
            close(model(value), plugin.eager(model, value))
        assert "the captured graph failed: vector::_M_range_check" in plugin.reasons()
    assert capfd.readouterr().err.count("runs eagerly") == 1


@pytest.mark.parametrize("callback", [None, False])
def test_the_callback_of_this_thread_is_read_by_exchange_too(callback: object) -> None:
    """torch 2.5 has no other way."""
    frames = torch._C._dynamo.eval_frame
    before = frames.set_eval_frame(callback)
    try:
        assert calls._swapped_callback() is callback
        assert calls._eval_frame_callback() is callback
    finally:
        frames.set_eval_frame(before)


class Named(nn.Module):
    """Is compared by its name, or cannot be compared at all."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.layer = name, nn.Linear(256, 256)

    def __eq__(self, other: object) -> bool:
        if not self.name:
            raise TypeError("no comparison")
        return isinstance(other, Named)

    def __hash__(self) -> int:
        return hash(self.name)

    def forward(self, value: Tensor, error: Exception | None = None) -> Tensor:
        if error is not None:
            raise error
        return self.layer(value)


@pytest.mark.parametrize("name", ["", "same"])
def test_modules_are_told_apart_by_identity(tmp_path: Path, name: str) -> None:
    models, value = [Named(name).eval(), Named(name).eval()], torch.randn(4, 256)
    settings = TorchSettings(precision="bf16", weights="bf16")
    with installed(tmp_path, settings, measured=True) as plugin:
        for _ in range(5):
            for model in models:
                close(model(value), plugin.eager(model.layer, value), tolerance=0.05)
        assert len(plugin.events("weights")) == len(models)
        assert plugin.reasons() == ""


def test_errors_of_the_program_keep_their_context(tmp_path: Path) -> None:
    class MuteError(ValueError):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Unreadable(Named):
        @property  # type: ignore[misc]
        def device(self) -> None: ...

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            raise MuteError

    settings = TorchSettings(precision="bf16", weights="bf16", graph="onednn")
    with installed(tmp_path, settings, measured=True):
        for model in (Named("ordinary").eval(), Unreadable("").eval()):
            for _ in range(3):
                error = MuteError("float")
                with pytest.raises(MuteError) as raised:
                    model(torch.randn(4, 256), error)
                assert raised.value is error
                assert error.__context__ is None
