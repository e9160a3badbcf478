"""--channels-last: gradients in flat buffers, memory that is taken hold of late, threads and forks in the middle."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.worker.features import channels_last  # noqa: E402
from cpulaunch.worker.features.optimizer_layout import align_optimizers  # noqa: E402
from tests.worker.capturing import close, installed  # noqa: E402
from tests.worker.features.test_channels_last import SETTINGS, Clock, Images  # noqa: E402

counts_owners = hasattr(torch._C, "_storage_Use_Count")
pytestmark = [pytest.mark.torch, pytest.mark.skipif(not counts_owners, reason="this torch does not count owners")]


def flat_gradients(model: nn.Module) -> Tensor:
    """A buffer of all gradients. Effect: the gradients are views of it, as those of distributed training."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def trained(model: Images, before: int, **options: bool) -> list[Tensor]:
    """The weights after each step, whose gradients are clipped in a flat buffer after the first `before` calls."""
    torch.manual_seed(1)
    weights = []
    with torch.enable_grad():
        for _ in range(before):
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        flat = flat_gradients(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
        for _ in range(30):
            flat.zero_()
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            flat.clamp_(-0.01, 0.01)
            optimizer.step()
            weights.append(model.convolution.weight.detach().clone())
    return weights


@pytest.mark.parametrize("options", [{}, {"fused": True}])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("measured", [False, True])
def test_gradients_stay_in_a_flat_buffer(tmp_path: Path, monkeypatch, options, before: int, measured: bool) -> None:
    torch.manual_seed(0)
    model, other = Images().train(), Images().train()
    other.load_state_dict(model.state_dict())
    expected = trained(other, before, **options)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 0.5))
    with installed(tmp_path, SETTINGS, measured=measured):
        for one, step in zip(trained(model, before, **options), expected, strict=True):
            torch.testing.assert_close(one.contiguous(), step, rtol=1e-3, atol=1e-3)


def test_gradients_that_the_program_keeps_stay_the_parameters(tmp_path: Path) -> None:
    model = Images().train()
    with installed(tmp_path, SETTINGS), torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept: list[Tensor | None] = []
        for step in range(4):
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            if not step:
                model.convolution.weight.grad = model.convolution.weight.grad.contiguous()
                kept = [parameter.grad for parameter in model.parameters()]
            optimizer.step()
            assert all(each.grad is one for each, one in zip(model.parameters(), kept, strict=True))
            optimizer.zero_grad(set_to_none=False)
    assert model.is_converted


def test_memory_taken_hold_of_in_the_middle_stays_the_weights(tmp_path: Path, monkeypatch) -> None:
    model, value = Images().eval(), torch.randn(2, 3, 8, 8)
    monkeypatch.setattr(channels_last, "_clock", Clock(model, 1.2))
    with installed(tmp_path, SETTINGS, measured=True) as plugin:
        while not model.is_converted:
            model(value)
        held = model.convolution.weight.data
        for _ in range(20):
            model(value)
        assert "channels_last is not faster" in plugin.reasons()
        held.zero_()
    assert not model.convolution.weight.any()


class Failing(Images):
    """Fails at its second and third call."""

    calls = 0

    def forward(self, value: Tensor) -> Tensor:
        result = super().forward(value)
        self.calls += 1
        if self.calls in (2, 3):
            raise RuntimeError("no licence")
        return result


@pytest.mark.parametrize("first", [0, 1])
def test_an_error_that_the_program_raises_is_not_taken_for_one_of_the_layout(tmp_path: Path, capfd, first: int) -> None:
    model, value, outcomes = Failing().eval(), torch.randn(2, 3, 8, 8), []
    model.calls = first
    with installed(tmp_path, SETTINGS) as plugin:
        for _ in range(4):
            try:
                close(model(value), plugin.eager(model.convolution, value).flatten(1))
                outcomes.append("result")
            except RuntimeError as error:
                outcomes.append(str(error))
    assert outcomes == ["result", "no licence", "no licence", "result", "result"][first : first + 4]
    assert capfd.readouterr().err == ""


class Waiting(Images):
    """A call in another thread lasts until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(entered=threading.Event(), end=threading.Event())

    def forward(self, value: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            self.entered.set()
            self.end.wait(30)
        return super().forward(value)


@pytest.fixture
def waiting(tmp_path: Path):
    """A model whose weights are converted, while a call of another thread uses them."""
    model = Waiting().eval()
    with installed(tmp_path, SETTINGS):
        thread = threading.Thread(target=lambda: torch.no_grad()(model)(torch.randn(2, 3, 8, 8)))
        thread.start()
        model.entered.wait(30)
        assert model.is_converted
        model.__dict__["thread"] = thread
        yield model
        model.end.set()
        thread.join()


def test_weights_are_not_moved_while_a_long_call_reads_them(waiting: Waiting, monkeypatch) -> None:
    monkeypatch.setattr(channels_last, "DRAIN_SECONDS", 0.05)
    pointer, value = waiting.convolution.weight.data_ptr(), torch.randn(2, 3, 8, 8)
    for _ in range(3):
        waiting(value)
        assert waiting.convolution.weight.data_ptr() == pointer
    waiting.end.set()
    waiting.thread.join()
    waiting(value)
    assert not waiting.is_converted


def test_a_forked_child_does_not_wait_for_calls_of_its_parents_threads(waiting: Waiting) -> None:
    child = os.fork()
    if not child:
        signal.alarm(30)
        torch.set_num_threads(1)
        started = time.monotonic()
        for _ in range(3):
            waiting(torch.ones(1, 3, 4, 4))
        os._exit(int(time.monotonic() - started > 3))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.second(self.first(value)).mean((2, 3))


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("before", [0, 1, 20])
def test_hooks_of_parts_see_results_in_the_layout_that_the_program_knows(
    tmp_path: Path, monkeypatch, before: int, measured: bool
) -> None:
    model, value, seen = Parts().eval(), torch.randn(2, 3, 8, 8), []
    monkeypatch.setattr(channels_last, "_clock", FasterWhenConverted(model.first))
    with installed(tmp_path, SETTINGS, measured=measured) as plugin:
        expected = plugin.eager(model, value)
        for _ in range(before):
            close(model(value), expected)
        assert before < 20 or not model.first.weight.is_contiguous()
        model.first.register_forward_hook(lambda part, given, result: seen.append(result))
        for _ in range(12):
            close(model(value), expected)
    assert len(seen) == 12
    assert all(result.is_contiguous() for result in seen)


def test_a_hook_of_all_modules_sees_results_in_the_layout_that_the_program_knows(tmp_path: Path) -> None:
    model, value, seen = Parts().eval(), torch.randn(2, 3, 8, 8), []
    with installed(tmp_path, SETTINGS):
        model(value)
        assert not model.first.weight.is_contiguous()
        handle = nn.modules.module.register_module_forward_hook(lambda part, given, result: seen.append(result))
        try:
            model(value)
        finally:
            handle.remove()
    assert all(result.is_contiguous() for result in seen)


class FasterWhenConverted:
    """A clock on which a call takes a second, and half of it with converted weights."""

    def __init__(self, part: nn.Conv2d) -> None:
        self.now, self.part = 0.0, part

    def __call__(self) -> float:
        self.now += 1.0 if self.part.weight.is_contiguous() else 0.5
        return self.now


def in_another_order() -> tuple[nn.Parameter, Tensor]:
    """A parameter in channels_last and a flat buffer that holds its gradient, all ones."""
    align_optimizers()
    weight = nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    flat = torch.ones(weight.numel())
    weight.grad = flat.view(4, 3, 3, 3)
    return weight, flat


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_a_closure_computes_stay(set_to_none: bool) -> None:
    weight, _ = in_another_order()
    optimizer, expected = torch.optim.SGD([weight], lr=0.1), 2 * weight.detach()

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    close(weight.grad, expected)


def test_gradients_that_a_hook_of_the_step_sets_to_zero_are_zero() -> None:
    weight, flat = in_another_order()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad(set_to_none=False))
    optimizer.step()
    assert not flat.any()
    assert weight.grad is not None
    assert weight.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
