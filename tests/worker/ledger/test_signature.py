"""Signatures of calls."""

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from cpulaunch.worker.ledger.signature import Signatures, describe  # noqa: E402

pytestmark = pytest.mark.torch


def test_the_programs_function_modes_see_nothing_of_it() -> None:
    seen = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    value = torch.ones(2, 9)
    with Seeing():
        signature = Signatures().of((value,), {"mask": value})
    assert describe(signature) == "float32[2, ≤16], float32[2, ≤16]"
    assert seen == []


def test_arguments_that_stay_cost_nothing_when_another_one_grows() -> None:
    """As a step of text generation with its mask: a new exact shape in each call, of one argument only."""
    signatures, count = Signatures(), [0]
    others = {f"other_{number}": torch.zeros(1, number) for number in range(12)}
    signatures.of((), {**others, "mask": torch.zeros(1, 999)})

    def profile(frame: Any, event: str, argument: Any) -> None:
        count[0] += event == "call"

    grown = {**others, "mask": torch.zeros(1, 1000)}
    sys.setprofile(profile)
    try:
        signature = signatures.of((), grown)
    finally:
        sys.setprofile(None)
    assert describe(signature).endswith("float32[1, ≤1024]")
    assert count[0] < 10
