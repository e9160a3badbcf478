"""Values that a captured call depends on, and which are told from values that are equal to them."""

import math
import sys
from collections import OrderedDict, defaultdict
from functools import partial
from types import MappingProxyType

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cpulaunch.worker.tensors.compare import exact_check  # noqa: E402
from tests.worker.capturing import Net, Plugin, close  # noqa: E402

pytestmark = pytest.mark.torch

NAN = float("nan")
EQUAL = [
    *((0.0, -0.0), (-0.0, 0.0), (complex(1, 0.0), complex(1, -0.0)), (1, True), (True, 1), (1, 1.0), (1.0, 1)),
    *(((1.0,), (1,)), ((0.0, 2), (-0.0, 2)), ((2, (1,)), (2, (True,))), (NAN, 0.0), (0.0, NAN)),
]
"""Pairs of values that are equal, or not equal to themselves, but different."""


@pytest.mark.parametrize(("kept", "other"), EQUAL)
def test_values_of_closures_are_told_from_equal_ones(plugin: Plugin, kept: object, other: object) -> None:
    class Keeping(Net):
        def forward(self, value: Tensor) -> dict[str, object]:
            return {"value": super().forward(value), "kept": kept}

    model, value = Keeping().eval(), torch.randn(4, 16)
    for _ in range(4):
        assert repr(model(value)["kept"]) == repr(kept)
    assert plugin.captured() == ["Keeping"]
    kept = other
    assert repr(model(value)["kept"]) == repr(other)


class Dividing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.shift = -0.0

    def forward(self, value: Tensor, zero: float) -> Tensor:
        return 1 / (super().forward(value).abs() * zero + self.shift)


@pytest.mark.parametrize("changed", ["argument", "attribute"])
def test_zeros_of_either_sign_are_told_apart(plugin: Plugin, changed: str) -> None:
    model, value, zero = Dividing().eval(), torch.randn(4, 16), -0.0
    for _ in range(4):
        close(model(value, zero), plugin.eager(model, value, zero))
    assert plugin.captured() == ["Dividing"]
    if changed == "argument":
        zero = 0.0
    else:
        model.shift = 0.0
    for _ in range(4):
        close(model(value, zero), plugin.eager(model, value, zero))


class Metres(float):
    """A number with a text of its own."""

    def __repr__(self) -> str:
        return "metres"


class Signed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.length = Metres(0.0)

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * math.copysign(1.0, self.length)


def test_zeros_of_a_class_of_numbers_are_told_apart(plugin: Plugin) -> None:
    model, value = Signed().eval(), torch.randn(4, 16)
    for zero in (0.0, -0.0, 0.0):
        model.length = Metres(zero)
        for _ in range(4):
            close(model(value), plugin.eager(model, value))


def test_a_value_that_is_not_a_number_needs_no_other_capture(plugin: Plugin) -> None:
    model, value = Dividing().eval(), torch.randn(4, 16)
    for _ in range(6):
        assert model(value, float("nan")).isnan().all()
    assert plugin.captured() == ["Dividing"]
    assert not plugin.reasons()


class Resetting(Net):
    """It sets an attribute that it does not read."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.state, self.first = state, state

    def look(self, value: Tensor) -> None:
        self.state = self.first


@pytest.mark.parametrize(
    ("first", "changed"),
    [(0.0, 5.0), (0.0, -0.0), (False, True), (None, "busy"), (torch.relu, torch.tanh)],
)
def test_an_attribute_that_each_call_sets_is_set_after_a_change(plugin: Plugin, first, changed) -> None:
    model, value = Resetting(first).eval(), torch.randn(4, 16)
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Resetting"]
    for _ in range(3):
        model.state = changed
        model(value)
        assert repr(model.state) == repr(first)
    close(model(value), plugin.eager(model, value))


class Choosing(Net):
    def __init__(self, chosen: object) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * (2 if 7 in self.chosen else 1)


@pytest.mark.parametrize("chosen", [frozenset(range(9)), frozenset(("a", "b")), set(range(9)), {7, 1.0}, {7, (1,)}])
def test_sets_are_not_compared_as_texts_at_each_call(plugin: Plugin, chosen: set[object]) -> None:
    model, value, called = Choosing(chosen).eval(), torch.randn(4, 16), set()
    for _ in range(4):
        model(value)
    assert plugin.captured() == ["Choosing"]

    def profile(frame: object, event: str, argument: object) -> None:
        called.add(getattr(argument, "__name__", ""))

    sys.setprofile(profile)
    try:
        result = model(value)
    finally:
        sys.setprofile(None)
    close(result, plugin.eager(model, value))
    assert not called & {"repr", "sorted"}


class Listing(Net):
    def __init__(self, kept: object) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, value: Tensor) -> dict[str, object]:
        return {"value": super().forward(value), "keys": list(self.kept)}


@pytest.mark.parametrize("kind", [dict, OrderedDict, partial(defaultdict, int), MappingProxyType])
@pytest.mark.parametrize(("key", "other"), [(0.0, -0.0), ((1,), (True,)), ((0.0, 2), (-0.0, 2)), (1, True)])
def test_keys_are_told_from_equal_ones(plugin: Plugin, kind, key: object, other: object) -> None:
    model, value = Listing(kind({"a": 3, key: 1})).eval(), torch.randn(4, 16)
    for changed in (key, other, key):
        model.kept = kind({"a": 3, changed: 1})
        for _ in range(4):
            assert repr(model(value)["keys"]) == repr(["a", changed])
    if kind is not MappingProxyType:  # Torch 2.5 does not take these.
        assert plugin.captured() == ["Listing", "Listing"]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_keys_are_told_from_those_in_another_order(plugin: Plugin, kind: type) -> None:
    model, value = Listing(kind(a=1, b=2)).eval(), torch.randn(4, 16)
    for names in ("ab", "ba", "ab"):
        model.kept = kind((name, "ab".index(name)) for name in names)
        for _ in range(4):
            assert model(value)["keys"] == list(names)
    assert plugin.captured() == ["Listing", "Listing"]


LARGE = [
    set(range(1000)),
    set(map(float, range(1, 1000))),
    [{*range(9)}],
    {(1, index) for index in range(1000)},
    {0.0, 1},
]


@pytest.mark.parametrize("value", [(1, 2), frozenset((1.0, "a")), (0.0,), ((1,), 2), 0.0, complex(0, 1), *LARGE])
def test_a_value_is_the_same_as_itself_and_as_a_copy(value: object) -> None:
    check = exact_check(value)
    assert check is not None
    assert check(value)
    assert check(eval(repr(value)))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        *(
            ({1, 2}, {True, 2}),
            ({1.0, "a"}, {1, "a"}),
            ({1, 2.0}, {1.0, 2}),
            ([0.0], [-0.0]),
            ({0.0, "a"}, {-0.0, "a"}),
        ),
        *((frozenset([(1,), (2,)]), frozenset([(1.0,), (2,)])), ([[1], 2], [[True], 2]), ([False, None], [0, None])),
    ],
)
def test_collections_of_equal_values_are_told_apart(value: object, other: object) -> None:
    check = exact_check(value)
    assert check is not None
    assert value == other
    assert not check(other)


@pytest.mark.parametrize("value", [7, 1.5, "a", None, frozenset("abc"), ("a", (b"b", None)), {torch.float32}, ()])
def test_a_value_that_no_other_is_equal_to_needs_no_check(value: object) -> None:
    assert exact_check(value) is None


def test_a_collection_that_may_change_is_compared_although_it_is_the_same_object() -> None:
    for value, other in (({1, 2}, True), ([1, 2], 1.0), ([[1], 2], [True])):
        check = exact_check(value)
        assert check is not None
        old = next(iter(value))
        if isinstance(value, set):
            value.remove(old)
            value.add(other)
        else:
            value[0] = other
        assert other == old
        assert not check(value)
