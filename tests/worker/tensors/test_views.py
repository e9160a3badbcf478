"""Which tensors are views of others, and that they can be made again from other memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cpulaunch.worker.tensors.aliasing import views  # noqa: E402

pytestmark = pytest.mark.torch


def remade(tensors: list[Tensor], found: dict[int, object]) -> None:
    """Asserts that each view, made again of a copy of its base, equals the original and follows its base."""
    for position, view in views([], tensors).items():
        base = tensors[view.base]
        copy = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype).copy_(base)
        again = view.of(copy)
        assert torch.equal(again, tensors[position])
        assert again.stride() == tensors[position].stride()
        copy.add_(1)
        assert torch.equal(again, tensors[position] + 1)
    assert sorted(views([], tensors)) == sorted(found)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("transposed", [1]),
        ("row", [1]),
        ("column of a transposed base", [1]),
        ("base last", [0, 1]),
        ("expanded", [1]),
        ("same", [1]),
        ("halves of a hidden tensor", []),
        ("another dtype", []),
        ("base with gaps", []),
        ("apart", []),
        ("empty", []),
    ],
)
def test_views_are_found(name: str, positions: list[int]) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "transposed": [base, base.t()],
        "row": [base, base[2]],
        "column of a transposed base": [base.t(), base[:, 1]],
        "base last": [base[0], base[1:, 2:], base],
        "expanded": [base, base[:, None].expand(4, 3, 6)],
        "same": [base, base.view(24)],
        "halves of a hidden tensor": list(base.chunk(2)),
        "another dtype": [base, base.view(torch.int32)],
        "base with gaps": [base[:, ::2], base[:, 0]],
        "apart": [base, base.clone()],
        "empty": [base, base[:0]],
    }[name]
    remade(tensors, dict.fromkeys(positions))


def test_views_of_a_base_that_begins_later_in_its_memory() -> None:
    memory = torch.arange(10.0)
    remade([memory[2:], memory[4:6]], {1: None})
    remade([memory[2:], memory[1:3]], {})


def test_conjugated_tensors_are_no_views() -> None:
    value = torch.randn(4, dtype=torch.complex64)
    remade([value, value.conj()], {})


def test_views_of_an_argument_are_found() -> None:
    value = torch.arange(12.0).view(3, 4)
    assert sorted(views([value], [value.t(), value[1]])) == [1, 2]


def test_a_view_of_arguments_that_share_memory_belongs_to_none_of_them() -> None:
    value = torch.arange(12.0).view(3, 4)
    assert views([value, value[1:]], [value[2]]) == {}
