"""Comparison of the outputs of a model with those of eager fp32."""

import math

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from models import INFERENCE, Case  # noqa: E402
from outputs import count_gflop, largest_error, root_mean_square, tensors_of  # noqa: E402

pytestmark = pytest.mark.torch


class Attention(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def test_tensors_are_found_in_tensors_sequences_and_mappings() -> None:
    one = torch.ones(2, dtype=torch.bfloat16)
    for output in (one, (one, None, (one,)), {"a": one, "cache": object()}):
        (tensor,) = tensors_of(output)
        assert tensor.dtype == torch.float32


def test_error_is_the_largest_of_all_outputs() -> None:
    reference = [torch.zeros(2), torch.zeros(3)]
    assert largest_error([torch.tensor([0.0, 0.5]), torch.tensor([0.0, -2.0, 1.0])], reference) == 2.0
    assert math.isnan(largest_error([torch.tensor([0.0, math.nan]), torch.zeros(3)], reference))
    with pytest.raises(ValueError, match="shapes"):
        largest_error(reference[:1], reference)


def test_rms_is_over_all_elements() -> None:
    assert root_mean_square([torch.tensor([3.0]), torch.tensor([4.0, 0.0])]) == pytest.approx((25 / 3) ** 0.5)


def test_operations_of_matrix_products_and_attention_are_counted() -> None:
    layer = torch.nn.Linear(8, 4, bias=False)
    assert count_gflop(Case(model=layer, inputs=(torch.ones(2, 8),))) == pytest.approx(2 * 2 * 8 * 4 / 1e9)
    x = torch.ones(1, 1, 4, 8)
    with torch.no_grad():
        assert count_gflop(Case(model=Attention(), inputs=(x, x, x))) == pytest.approx(2 * 2 * 4 * 4 * 8 / 1e9)


def test_every_model_is_the_same_in_every_process() -> None:
    build, batch = INFERENCE["mlp"]
    outputs = []
    for _ in range(2):
        torch.manual_seed(20)
        case = build(batch)
        with torch.no_grad():
            outputs.append(tensors_of(case.model(*case.inputs)))
    assert largest_error(*outputs) == 0.0
