"""Arguments that may carry tensors from one call to the next."""

from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cpulaunch.worker.tensors.objects import holds_objects  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.ones(1)


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "a",
        X,
        torch.nn.Parameter(X),
        (X, [X, {"a": (X, None)}]),
        {"mask": X, "flag": True},
        torch.float32,
        (),
        OrderedDict(a=X),
    ],
    ids=repr,
)
def test_tensors_and_constants_in_containers_are_no_objects(value: Any) -> None:
    assert not holds_objects(value)
    assert not holds_objects(X, {"a": value})


@pytest.mark.parametrize(
    "value",
    [SimpleNamespace(keys=[]), object(), deque([X]), OrderedDict(a={1}), torch.Generator(), print, torch.nn.ReLU()],
)
def test_anything_else_is(value: Any) -> None:
    assert holds_objects(value)
    assert holds_objects(X, [{"cache": (1, value)}])
