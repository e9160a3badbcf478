"""Values that a captured call depends on, and which are told from values that are equal to them."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from tests.worker.capturing import Plugin, close  # noqa: E402
from tests.worker.graph.test_graph_reads import Net  # noqa: E402

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
