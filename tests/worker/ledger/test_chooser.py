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
        chooser.add(turn, 2.0 if turn.mode == "autocast" else 1.0, now=0.0)
        if chooser.runs or number == last_is_interrupted_after:
            return chooser, number
    raise AssertionError("every call is measured")


def test_a_call_that_ends_after_its_choice_was_forgotten_decides_nothing() -> None:
    module = nn.Linear(2, 2).eval()
    chooser, number = calls_until_a_run(module)
    assert id(module) in chooser.runs
    chooser, _ = calls_until_a_run(module, last_is_interrupted_after=number)
    assert not chooser.runs


class Server:
    """Calls of one module by their number of rows, with made-up durations; most in a row need not be measured."""

    def __init__(self, seconds: dict[int, dict[str, float]]) -> None:
        self.seconds = seconds
        self.module = nn.Linear(2, 2).eval()
        self.chooser = Chooser(lambda _: ("graph", "plain"), lambda *_: False)
        self.now = 0.0
        self.ran: list[tuple[int, str]] = []
        self.turns = 0

    def call(self, rows: int, *, pause: float = 0.0) -> None:
        self.now += pause
        args = (torch.zeros(rows, 2),)
        unmeasured = self.chooser.unmeasured(self.module, args, {}, self.now)
        turn = None if unmeasured else self.chooser.turn(self.module, args, {}, self.now)
        mode = unmeasured if turn is None else turn.mode
        seconds = self.seconds[rows][str(mode)]
        self.ran.append((rows, str(mode)))
        self.now += seconds
        if turn is not None:
            self.turns += 1
            self.chooser.add(turn, seconds, now=self.now)


def test_long_calls_among_short_ones_in_another_mode_soon_have_a_choice_of_their_own() -> None:
    """Text generation with short prompts, then long ones, for which the mode is five times slower than plain."""
    server = Server({1: {"graph": 0.5e-3, "plain": 1e-3}, 64: {"graph": 0.5, "plain": 0.1}})
    with torch.no_grad():
        for _ in range(2000):
            server.call(1)
        assert server.ran[-1] == (1, "graph")
        for number in range(30 * 101):
            server.call(1 if number % 101 else 64)
    assert server.ran.count((64, "graph")) < 6


@pytest.mark.parametrize("short_calls", [5, 100, 700])
def test_a_mode_is_tried_for_long_calls_that_appear_among_short_plain_ones(short_calls: int) -> None:
    server = Server({1: {"graph": 1.3e-3, "plain": 1e-3}, 64: {"graph": 0.1, "plain": 0.5}})
    with torch.no_grad():
        for _ in range(5000):
            server.call(1)
        assert server.ran[-1] == (1, "plain")
        for number in range(40 * (short_calls + 1)):
            server.call(1 if number % (short_calls + 1) else 64)
    assert server.ran[-100 * short_calls :].count((64, "plain")) < 20
    assert server.ran[-2 * short_calls :].count((64, "graph")) > 0


def test_pauses_between_calls_do_not_keep_them_measured() -> None:
    server = Server({1: {"graph": 1.3e-3, "plain": 1e-3}})
    with torch.no_grad():
        for number in range(10_000):
            server.call(1, pause=5e-3)
            server.turns *= number != 5000
    assert server.turns < 50


def test_calls_that_all_raise_are_plain() -> None:
    """A hook may stop each call early by an exception."""
    module, chooser = nn.Linear(2, 2).eval(), Chooser(lambda _: ("autocast", "plain"), lambda *_: False)
    modes = []
    with torch.no_grad():
        for number in range(50):
            turn = chooser.turn(module, (), {}, float(number))
            modes.append(turn.mode)
            chooser.fail(turn)
    assert modes == ["autocast", *["plain"] * 49]
