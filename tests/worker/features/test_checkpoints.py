"""Calls in torch.utils.checkpoint, which computes them again in the backward pass."""

import itertools
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.features import channels_last, module_calls  # noqa: E402
from tests.worker.capturing import installed  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
        reason="torch 2.5 does not tell which hooks are in force",
    ),
]


class Outer(nn.Module):
    def __init__(self, *inner: nn.Module, use_reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.use_reentrant = nn.Sequential(*inner), use_reentrant

    def forward(self, value: Tensor) -> Tensor:
        first, second = self.inner

        def inner(given: Tensor) -> Tensor:
            return second(first(given).relu())

        return torch.cat([checkpoint(inner, half, use_reentrant=self.use_reentrant) for half in value.chunk(2)])


@pytest.mark.parametrize("inside", [False, True])
def test_calls_save_the_same_tensors_when_they_are_computed_again(tmp_path: Path, monkeypatch, inside: bool) -> None:
    """torch raises CheckpointError otherwise. The parts are called one by one, in the backward pass at least."""
    monkeypatch.setattr(module_calls, "_clock", itertools.count(0.0, 0.1).__next__)
    model = Outer(nn.Linear(16, 16), nn.Linear(16, 16)).train()
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True), torch.enable_grad():
        for _ in range(100):
            value = torch.randn(4, 16, requires_grad=True)
            result = model(value) if inside else checkpoint_sequential(model.inner, 2, value, use_reentrant=False)
            result.sum().backward()


def test_parts_that_are_computed_again_have_no_trial_of_channels_last(tmp_path: Path, monkeypatch) -> None:
    """It would end that of the model."""
    model = Outer(nn.Conv2d(3, 8, 3), nn.Flatten(), use_reentrant=True).train()
    weight, now = model.inner[0].weight, [0.0]
    model.register_forward_pre_hook(lambda *_: now.append(now[-1] + (1.0 if weight.is_contiguous() else 0.5)))
    monkeypatch.setattr(channels_last, "_clock", lambda: now[-1])
    with installed(tmp_path, TorchSettings(channels_last=True), measured=True), torch.enable_grad():
        for _ in range(80):
            model(torch.randn(2, 3, 8, 8, requires_grad=True)).sum().backward()
    assert not weight.is_contiguous()


def test_what_a_checkpoint_runs_in_eval_mode_keeps_its_gradients_in_both_passes(tmp_path: Path) -> None:
    """torch pairs what both passes save by number: without an error, gradients would be of other tensors."""
    frozen, head, value = nn.Linear(8, 8).eval(), nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def gradient() -> Tensor:
        head.zero_grad()
        checkpoint(lambda given: head(frozen(given).relu()), value, use_reentrant=False).square().sum().backward()
        assert head.weight.grad is not None
        return head.weight.grad.clone()

    expected = gradient()
    with installed(tmp_path, TorchSettings(inference_mode=True), measured=True), torch.enable_grad():
        for _ in range(50):
            frozen(value)
        for _ in range(5):
            torch.testing.assert_close(gradient(), expected)
