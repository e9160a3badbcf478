"""What the ranks of the benches do beside timing."""

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

import torch
from rank_timing import checked

pytestmark = pytest.mark.torch


def test_a_way_that_computes_something_else_is_not_timed() -> None:
    tensor = torch.empty(4)
    checked({"right": lambda: tensor.mul_(3)}, tensor, mine=2, expected=6)
    assert tensor.tolist() == [0, 0, 0, 0]
    with pytest.raises(RuntimeError, match=r"wrong: 16 bytes are 2\.0 to 6\.0, and should be 6"):
        checked({"right": lambda: tensor.mul_(3), "wrong": lambda: tensor[1:].mul_(3)}, tensor, mine=2, expected=6)
