"""Signatures of calls."""

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
