"""Choices for modules, without calls of them."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cpulaunch.worker.ledger.chooser import Chooser  # noqa: E402

pytestmark = pytest.mark.torch


def calls_until_a_run(module: nn.Module, *, last_is_interrupted_after: int | None = None) -> tuple[Chooser, int]:
    """A chooser for which calls ended until the next ones need not be measured, and the number of these calls."""
    chooser = Chooser(lambda _: ("autocast", "plain"), lambda _module, _mode: False)
    for number in range(100):
        turn = chooser.turn(module, (), {}, 0.0)
        if number == last_is_interrupted_after:
            chooser.restart(module)
        chooser.add(turn, 2.0 if turn.mode == "autocast" else 1.0)
        if chooser.runs or number == last_is_interrupted_after:
            return chooser, number
    raise AssertionError("every call is measured")


def test_a_call_that_ends_after_its_choice_was_forgotten_decides_nothing() -> None:
    module = nn.Linear(2, 2).eval()
    chooser, number = calls_until_a_run(module)
    assert id(module) in chooser.runs
    chooser, _ = calls_until_a_run(module, last_is_interrupted_after=number)
    assert not chooser.runs
