"""The checks that a rank of the benches makes before it times a collective."""

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

import torch
from rank_timing import checked

pytestmark = pytest.mark.torch


def test_a_wrong_result_is_an_error() -> None:
    tensor = torch.empty(4)
    checked({"right": lambda: tensor.mul_(3)}, tensor, mine=2, expected=6)
    assert tensor.tolist() == [0, 0, 0, 0]
    with pytest.raises(RuntimeError, match=r"wrong: 16 bytes are 2\.0 to 6\.0 instead of 6"):
        checked({"right": lambda: tensor.mul_(3), "wrong": lambda: tensor[1:].mul_(3)}, tensor, mine=2, expected=6)
