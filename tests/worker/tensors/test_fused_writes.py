"""Versions of tensors that torch's fused optimizer steps change."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cpulaunch.worker.tensors.versions import count_fused_writes  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not hasattr(torch, "_fused_sgd_"), reason="this torch has no fused SGD"),
]


def step(parameters: list[Tensor], gradients: list[Tensor], **scale: Any) -> None:
    """Effect: a fused step of SGD without momentum."""
    count_fused_writes()
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_(
        parameters, gradients, [], lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, **flags, **scale
    )


def test_a_step_that_fails_half_way_has_changed_parameters() -> None:
    first, other = torch.ones(3), torch.ones(3, dtype=torch.int64)
    with pytest.raises(RuntimeError):
        step([first, other], [torch.ones(3), other.clone()])
    assert first._version == 1


@pytest.mark.parametrize("scale", [None, 4.0])
def test_a_step_changes_gradients_if_it_divides_them_by_a_scale(scale: float | None) -> None:
    gradient = torch.full((3,), 8.0)
    named = {} if scale is None else {"grad_scale": torch.tensor(scale), "found_inf": torch.tensor(0.0)}
    step([torch.ones(3)], [gradient], **named)
    assert gradient.equal(torch.full((3,), 8.0 / (scale or 1.0)))
    assert gradient._version == (scale is not None)
