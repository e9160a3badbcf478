"""Arguments that may carry tensors from one call to the next."""

from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cpulaunch.worker.tensors.objects import form_of, holds_objects, own_parts  # noqa: E402

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


def test_flags_of_arguments_and_of_own_parts_make_a_form() -> None:
    class Part(torch.nn.Module):
        keeps: Any

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.keeps = torch.nn.Linear(2, 2), False

    module = torch.nn.Sequential(Part(), torch.nn.ReLU())
    parts = own_parts(module)
    plain = form_of(parts, (X, 1), {"mask": None})
    assert form_of(parts, (X + 1, 2), {"mask": None}) == plain
    others = [form_of(parts, (X, 1), given) for given in ({}, {"mask": X}, {"mask": True}, {"mask": "full"})]
    module[0].keeps = []
    others.append(form_of(parts, (X, 1), {"mask": None}))
    module[0].keeps = False
    assert form_of(parts, (X, 1), {"mask": None}) == plain
    module[0].new = True
    others.append(form_of(parts, (X, 1), {"mask": None}))
    assert len({plain, *others}) == 1 + len(others)
