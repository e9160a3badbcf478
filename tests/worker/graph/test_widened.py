"""Results in bf16 are given back in fp32, and share memory as before."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cpulaunch.worker.graph.precision import widened  # noqa: E402

pytestmark = pytest.mark.torch


def low(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def test_a_tensor_in_two_places_stays_one_and_views_stay_views() -> None:
    y = low(4, 8)
    other, parts = torch.ones(2), y.split(2)
    got: Any = widened({"last": y, "first": y[:, 0], "hidden": [y], "t": y.t(), "parts": parts, "other": other})
    assert got["hidden"][0] is got["last"]
    assert got["other"] is other
    torch.testing.assert_close(got["t"], y.t().float())
    got["last"].zero_()
    assert not got["first"].any()
    assert not any(part.any() for part in got["parts"])


def test_what_shares_no_memory_stays_apart() -> None:
    y = low(4, 8)
    got = widened((y, y.clone(), y[:0]))
    got[0].zero_()
    assert got[1].any()
    assert [each.shape for each in got] == [(4, 8), (4, 8), (0, 8)]


@pytest.mark.parametrize("value", [low(8).expand(4, 8), low(4, 1).expand(4, 8), low(4, 8).t(), low(4, 8), low(1, 8)])
def test_strides_stay(value: Tensor) -> None:
    for got in (widened(value), widened([value])[0]):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, value.float())
        assert got.stride() == value.stride()


def test_gradients_flow_as_before() -> None:
    x = torch.ones(4, 8, requires_grad=True)
    y = x.bfloat16() * 2
    whole, first, constant = widened((y, y[:, 0], y.detach()))
    assert [each.requires_grad for each in (whole, first, constant)] == [True, True, False]
    (whole.sum() + first.sum()).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[:, 0], torch.full((4,), 4.0))
    torch.testing.assert_close(x.grad[:, 1], torch.full((4,), 2.0))


def test_sparse_results_are_widened() -> None:
    dense = torch.eye(3, dtype=torch.bfloat16)
    first, second = widened((dense.to_sparse(), dense))
    assert first.dtype is second.dtype is torch.float32
