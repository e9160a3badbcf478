"""In which type a packed weight multiplies many rows: bf16 only where the CPU multiplies bf16 faster."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from cpulaunch.worker.weights import form  # noqa: E402
from cpulaunch.worker.weights.form import Form  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("is_fast", [True, False])
def test_many_rows_are_multiplied_in_bf16_where_that_is_fast(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_fast: bool
) -> None:
    monkeypatch.setattr(form, "_fast", [is_fast])
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128), torch.randn(50, 128)
    with torch.no_grad():
        expected = functional.linear(x, weight)
        result = Form(weight, kind).multiply(x, None, functional.linear)
        assert result.dtype is torch.float32
        assert torch.equal(result, expected) is not is_fast
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = Form(weight, kind).multiply(x, None, functional.linear)
        assert low.dtype is torch.bfloat16
        assert (low.float() - expected).norm() < 0.2 * expected.norm()
