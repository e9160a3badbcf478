"""Choices for modules, without calls of them."""

import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cpulaunch.worker.ledger.account import MEASURING_SHARE  # noqa: E402
from cpulaunch.worker.ledger.chooser import Chooser  # noqa: E402
from cpulaunch.worker.ledger.decision import Decision  # noqa: E402
from cpulaunch.worker.ledger.family import MAX_FAMILIES, MAX_SIGNATURES, ModuleFamilies  # noqa: E402
from cpulaunch.worker.ledger.runs import FIRST_SLACK  # noqa: E402

pytestmark = pytest.mark.torch


def calls_until_a_run(module: nn.Module, *, last_is_interrupted_after: int | None = None) -> tuple[Chooser, int]:
    """A chooser for which calls ended until the next ones need not be measured, and the number of these calls."""
    chooser = Chooser(lambda _: ("autocast", "plain"), lambda *_: set())
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
    assert (id(module), False, True) in chooser.runs
    chooser, _ = calls_until_a_run(module, last_is_interrupted_after=number)
    assert not chooser.runs


MEASURING_SECONDS = 100e-6
"""What it costs to measure a call: 100 us of short ones on a CPU of 2.5 GHz, 180 to 350 us after calls of 4 ms."""


class Server:
    """Calls of one module by their number of rows, with made-up durations; most in a row need not be measured."""

    def __init__(self, seconds: dict[int, dict[str, float]]) -> None:
        self.seconds = seconds
        self.values = {rows: torch.zeros(rows, 2) for rows in seconds}
        self.module = nn.Linear(2, 2).eval()
        self.random = random.Random(0).random
        self.has_own_autocast = False
        self.chooser = Chooser(
            lambda _: ("plain",) if self.has_own_autocast else ("graph", "plain"),
            lambda *_: set(),
            place_of=lambda _: ("cpu", self.has_own_autocast),
        )
        self.now = 0.0
        self.ran: list[tuple[int, str]] = []
        self.turns = 0

    def counted(self, rows: int) -> str | None:
        """What the wrapper does first: a plain run counts calls of any signature."""
        run = self.chooser.runs.get((id(self.module), self.module.training, torch.is_grad_enabled()))
        if run is None:
            return None
        is_timed = run.left <= run.next_timed
        if is_timed and (run.left <= 0 or run.seconds <= 0 or run.until < self.now):
            return None
        run.left -= 1
        if is_timed:
            run.seconds -= self.seconds[rows]["plain"]
            run.next_timed = run.left - int(run.spread * self.random())
        return "plain"

    def call(self, rows: int, *, pause: float = 0.0) -> None:
        self.now += pause
        args = (self.values[rows],)
        unmeasured = self.counted(rows) or self.chooser.unmeasured(self.module, args, {}, self.now)
        turn = None if unmeasured else self.chooser.turn(self.module, args, {}, self.now)
        mode = unmeasured if turn is None else turn.mode
        seconds = self.seconds[rows][str(mode)]
        self.ran.append((rows, str(mode)))
        self.now += seconds
        if turn is not None:
            self.turns += 1
            self.chooser.add(turn, seconds, now=self.now)
            turn.spend(MEASURING_SECONDS)


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


@pytest.mark.parametrize("short_calls", [5, 100, 655, 700, 1024])
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


@pytest.mark.parametrize("period", [5, 7, 25, 41])
def test_calls_in_step_with_those_in_the_programs_own_autocast_have_a_mode(period: int) -> None:
    server = Server({1: {"graph": 20e-6, "plain": 100e-6}})
    with torch.no_grad():
        for number in range(50_000):
            server.has_own_autocast = number % period == 0
            server.call(1)
    outside = [mode for number, (_, mode) in enumerate(server.ran) if number % period]
    assert outside.count("graph") > 0.95 * len(outside)


def test_plain_calls_in_the_programs_own_autocast_leave_those_outside_unmeasured() -> None:
    server = Server({1: {"graph": 0.2e-3, "plain": 1e-3}, 2: {"graph": 2e-3, "plain": 1e-3}})
    with torch.no_grad():
        for number in range(20_000):
            server.has_own_autocast = number % 2 == 0
            server.call(1 + number // 2 % 2)
    assert server.turns < 400


def test_one_call_outside_does_not_have_those_in_the_programs_own_autocast_looked_at() -> None:
    server = Server({1: {"graph": 0.2e-3, "plain": 1e-3}})
    with torch.no_grad():
        server.call(1)
        server.has_own_autocast = True
        for _ in range(12_000):
            server.call(1)
        assert all(server.counted(1) for _ in range(10))


@pytest.mark.parametrize("period", [2, 3, 8, 64])
@pytest.mark.parametrize("seed", range(3))
def test_long_calls_in_whatever_step_with_short_ones_soon_have_a_mode(period: int, seed: int) -> None:
    server = Server({1: {"graph": 20e-6, "plain": 10e-6}, 64: {"graph": 2e-3, "plain": 10e-3}})
    server.chooser._numbers = random.Random(seed)
    with torch.no_grad():
        for _ in range(60_000):
            server.call(1)
        begun = server.now
        number = 0
        while server.ran.count((64, "graph")) < 50:
            number += 1
            server.call(1 if number % period else 64)
            assert server.now < begun + 2
            if number % 200 == 0:
                server.ran = [each for each in server.ran if each[0] == 64]


@pytest.mark.parametrize("seconds", [10e-6, 50e-6, 90e-6])
@pytest.mark.parametrize("seed", range(3))
def test_steady_short_calls_do_not_seem_to_have_become_longer(seconds: float, seed: int) -> None:
    server = Server({1: {"graph": 2 * seconds, "plain": seconds}})
    server.chooser._numbers, server.random = random.Random(seed), random.Random(1000 + seed).random
    with torch.no_grad():
        for _ in range(20_000):
            server.call(1)
    assert server.chooser._entries[id(server.module)].slack == FIRST_SLACK


def test_pauses_of_a_server_do_not_have_its_calls_measured() -> None:
    server = Server({1: {"graph": 5.2e-3, "plain": 4e-3}})
    with torch.no_grad():
        for number in range(4000):
            server.call(1, pause=0.0 if number % 12 else 0.05)
            server.turns *= number != 1000
    assert server.turns < 40


def test_pauses_between_calls_do_not_keep_them_measured() -> None:
    server = Server({1: {"graph": 1.3e-3, "plain": 1e-3}})
    with torch.no_grad():
        for number in range(10_000):
            server.call(1, pause=5e-3)
            server.turns *= number != 5000
    assert server.turns < 50


@pytest.mark.parametrize(("seconds", "pause"), [(1e-3, 0.3), (1e-4, 0.05)])
def test_long_pauses_between_calls_keep_few_of_them_measured(seconds: float, pause: float) -> None:
    server = Server({1: {"graph": 1.3 * seconds, "plain": seconds}})
    with torch.no_grad():
        for number in range(20_000):
            server.call(1, pause=pause)
            server.turns *= number != 15_000
    assert server.turns < 200


@pytest.mark.parametrize("learns", [False, True])
def test_calls_that_alternate_between_acting_and_learning_are_soon_not_measured(learns: bool) -> None:
    server = Server({1: {"graph": 1.3e-3, "plain": 1e-3}})
    for number in range(4000):
        server.module.train(number % 2 == 1)
        with torch.set_grad_enabled(learns and server.module.training):
            server.call(1)
        server.turns *= number != 2000
    assert server.ran[-2:] == [(1, "plain")] * 2
    assert server.turns < 100


def test_training_is_measured_by_steps_while_calls_in_between_are_not() -> None:
    """The call that ends a training step must be noticed: the program may act for long until the next one."""
    server = Server({1: {"graph": 0.5e-3, "plain": 1e-3}})
    for _ in range(20):
        for training, calls in ((False, 300), (True, 40)):
            server.module.train(training)
            with torch.set_grad_enabled(training):
                for _ in range(calls):
                    server.call(1)
    assert server.ran[-1] == (1, "graph")


@pytest.mark.parametrize("short_calls", [100, 655, 1024])
def test_a_mode_is_tried_for_long_calls_between_training_steps(short_calls: int) -> None:
    """A run of one kind that ends as expected does not stop the calls that are measured for one of the other kind."""
    server = Server({1: {"graph": 1.3e-3, "plain": 1e-3}, 64: {"graph": 0.1, "plain": 0.5}})
    for number in range(20_000):
        server.module.train(number % 101 == 0)
        with torch.set_grad_enabled(server.module.training):
            is_long = number > 1500 and not server.module.training and number % short_calls == 0
            server.call(64 if is_long else 1)
    assert server.ran[-2 * short_calls :].count((64, "graph")) > 0


def test_modes_that_were_impossible_are_found_out_again_between_short_phases() -> None:
    server = Server({1: {"graph": 0.5e-3, "plain": 1e-3}})
    possible = ["plain"]
    server.chooser = Chooser(lambda _: tuple(possible), lambda *_: set())
    with torch.no_grad():
        for number in range(6020):
            server.module.train(number % 100 < 50)
            server.call(1)
            possible[:] = ["graph", "plain"]
    assert server.ran[-1] == (1, "graph")


def test_the_seconds_of_a_module_include_calls_that_are_not_measured() -> None:
    server = Server({1: {"graph": 0.2, "plain": 0.1}})
    for _ in range(200):
        server.call(1)
    assert server.turns < 100
    assert server.chooser.seconds(server.module) > 0.9 * server.now
    assert server.chooser.seconds(nn.Linear(2, 2)) == 0


def test_calls_that_all_raise_are_plain() -> None:
    """A hook may stop each call early by an exception."""
    module, chooser = nn.Linear(2, 2).eval(), Chooser(lambda _: ("autocast", "plain"), lambda *_: set())
    modes = []
    with torch.no_grad():
        for number in range(50):
            turn = chooser.turn(module, (), {}, float(number))
            modes.append(turn.mode)
            chooser.fail(turn)
    assert modes == ["autocast", *["plain"] * 49]


FASTER, SLOWER = {"graph": 0.5, "plain": 1.0}, {"graph": 1.5, "plain": 1.0}


@pytest.mark.parametrize(("large", "small"), [(FASTER, SLOWER), (SLOWER, FASTER)], ids=["plain", "graph"])
def test_a_choice_for_other_calls_does_not_keep_these_measured(large, small) -> None:
    """A few large batches, then single rows for long, for which another mode is faster."""
    server = Server(
        {64: {mode: 2e-2 * factor for mode, factor in large.items()}, 1: {m: 2e-4 * f for m, f in small.items()}}
    )
    best = {rows: min(seconds, key=lambda mode: seconds[mode]) for rows, seconds in server.seconds.items()}
    with torch.no_grad():
        for _ in range(100):
            server.call(64)
        for number in range(6000):
            server.call(1)
            server.turns *= number != 3000
        assert server.turns < 100
        assert server.ran[-1] == (1, best[1])
        for number in range(5000):
            server.call(1 if number % 50 else 64)
    found = [mode for rows, mode in server.ran[-5000:] if rows == 64]
    assert found.count(best[64]) > 0.9 * len(found)


def test_signatures_that_alternate_between_modes_are_soon_not_measured() -> None:
    seconds = {64: {"graph": 0.5e-2, "plain": 1e-2}, 1: {"graph": 3e-4, "plain": 2e-4}}
    server = Server(seconds)
    with torch.no_grad():
        for number in range(8000):
            server.call(1 if number % 2 else 64)
            server.turns *= number != 4000
    assert server.turns < 400
    assert server.ran[-2:] == [(64, "graph"), (1, "plain")]


def test_plain_calls_become_cheap_again_long_after_those_in_another_mode() -> None:
    """A run of plain calls that the wrapper need not look at, although a warm-up has chosen another mode."""
    server = Server({64: {"graph": 0.5e-2, "plain": 1e-2}, 1: {"graph": 3e-4, "plain": 2e-4}})
    with torch.no_grad():
        for _ in range(100):
            server.call(64)
        for _ in range(100_000):
            server.call(1)
    assert server.chooser.runs


def test_a_disturbed_machine_does_not_have_calls_measured_for_more_than_their_share() -> None:
    """Spells of other work make runs longer than expected, and change the choice, again and again."""
    numbers = random.Random(0)
    server = Server({1: {"graph": 0.52e-3, "plain": 0.5e-3}})
    with torch.no_grad():
        for number in range(40_000):
            if number % 500 == 0:
                graph, plain = numbers.choice([(1.0, 1.0), (1.0, 1.0), (1.2, 2.0), (1.5, 3.0)])
                server.seconds = {1: {"graph": 0.52e-3 * graph, "plain": 0.5e-3 * plain}}
            server.call(1)
            server.turns *= number != 4000
    assert server.turns * MEASURING_SECONDS < 1.1 * MEASURING_SHARE * server.now


@pytest.mark.parametrize("learns", [False, True])
def test_ever_new_copies_of_a_model_share_what_the_first_ones_found_out(learns: bool) -> None:
    """Federated averaging, or a search of parameters: each copy is called a few times only."""
    chooser = Chooser(lambda _: ("autocast", "plain"), lambda *_: set())
    now, slow, calls = 0.0, 0, 0
    for _ in range(200):
        module = nn.Linear(2, 2).train(learns)
        with torch.set_grad_enabled(learns):
            for _ in range(50):
                turn = chooser.turn(module, (torch.zeros(1, 2),), {}, now)
                seconds = 0.3 if turn.mode == "autocast" else 0.1
                now, slow, calls = now + seconds, slow + (turn.mode == "autocast"), calls + 1
                chooser.add(turn, seconds, now=now)
    assert 0 < slow < 0.02 * calls


def test_a_new_copy_begins_with_the_mode_that_the_others_have_chosen() -> None:
    chooser = Chooser(lambda _: ("autocast", "plain"), lambda *_: set())
    now, modes = 0.0, []
    with torch.no_grad():
        for _ in range(20):
            module, modes = nn.Linear(2, 2).eval(), []
            for _ in range(50):
                turn = chooser.turn(module, (torch.zeros(1, 2),), {}, now)
                modes.append(turn.mode)
                seconds = 0.05 if turn.mode == "autocast" else 0.1
                now += seconds
                chooser.add(turn, seconds, now=now)
    assert modes[0] == "autocast"
    assert modes.count("plain") < 10


def test_modules_whose_weights_have_no_shape_yet_have_a_choice_each() -> None:
    chooser = Chooser(lambda _: ("autocast", "plain"), lambda *_: set())
    for _ in range(8):
        module = nn.LazyLinear(2).eval()
        assert chooser.turn(module, (torch.zeros(1, 2),), {}, 0.0).mode == "autocast"


@pytest.mark.parametrize("calls", [6, 10, 50])
def test_copies_too_short_to_choose_a_mode_go_on_with_the_samples_of_one_another(calls: int) -> None:
    chooser = Chooser(lambda _: ("autocast", "plain"), lambda *_: set())
    now, fast = 0.0, 0
    with torch.no_grad():
        for number in range(100):
            module = nn.Linear(2, 2).eval()
            for _ in range(calls):
                turn = chooser.turn(module, (torch.zeros(1, 2),), {}, now)
                seconds = 0.05 if turn.mode == "autocast" else 0.1
                now += seconds
                chooser.add(turn, seconds, now=now)
                fast += number > 50 and turn.mode == "autocast"
    assert fast > 0.9 * 49 * calls


def test_modules_that_are_called_once_leave_the_samples_of_the_next_one_free() -> None:
    """Those of a program that first builds its models with a dummy input."""
    chooser = Chooser(lambda _: ("autocast", "plain"), lambda *_: set())
    models = [nn.Linear(2, 2).eval() for _ in range(8)]
    with torch.no_grad():
        for module in models:
            chooser.add(chooser.turn(module, (torch.zeros(1, 2),), {}, 0.0), 0.1, now=0.1)
        modes = []
        for number in range(50):
            turn = chooser.turn(models[-1], (torch.zeros(1, 2),), {}, float(number))
            modes.append(turn.mode)
            chooser.add(turn, 0.05 if turn.mode == "autocast" else 0.1, now=number + 0.1)
    assert modes[-1] == "autocast"


@pytest.mark.parametrize("acts", [30, 100])
def test_steps_end_at_calls_that_are_not_measured(acts: int) -> None:
    """Acting in a mode, then learning from it: the time between two steps is not that of one."""
    seconds = {"autocast": {False: 1e-3, True: 18e-3}, "plain": {False: 2e-3, True: 20e-3}}
    chooser, module, now = Chooser(lambda _: ("autocast", "plain"), lambda *_: set()), nn.Linear(2, 2), 0.0
    steps = []
    for number in range(400 * (acts + 1)):
        learns = number % (acts + 1) == 0
        module.train(learns)
        with torch.set_grad_enabled(learns):
            args = (torch.zeros(1, 2),)
            mode = chooser.unmeasured(module, args, {}, now)
            turn = None if mode else chooser.turn(module, args, {}, now)
            mode = mode or turn.mode
        now += seconds[mode][learns]
        if turn is not None:
            chooser.add(turn, seconds[mode][learns], now=now)
        if learns:
            steps.append(mode)
    assert steps[-50:].count("autocast") > 45
    assert chooser.seconds(module) < 1.1 * now


def test_pauses_between_calls_in_another_mode_do_not_keep_them_measured() -> None:
    server = Server({1: {"graph": 0.5e-3, "plain": 1e-3}})
    with torch.no_grad():
        for number in range(10_000):
            server.call(1, pause=0.1)
            server.turns *= number != 5000
    assert server.turns < 500


def test_ever_new_shapes_do_not_make_families_grow() -> None:
    families = ModuleFamilies()
    for size in range(1, 2000):
        family = families.of(nn.Linear(1, size))
        family.leave({"s": Decision(("graph", "plain"))})
    assert len(families._families) == MAX_FAMILIES
    for number in range(2000):
        family.leave({number: Decision(("graph", "plain"))})
    assert len(family.unfinished) == MAX_SIGNATURES


def test_what_was_forgotten_of_a_module_is_nothing_to_go_on_with_for_the_next_copy() -> None:
    """Its modes or its memory layout have changed since."""
    chooser, module = Chooser(lambda _: ("autocast", "plain"), lambda *_: set()), nn.Linear(2, 2).eval()
    with torch.no_grad():
        for seconds in (9.0, 1.0):
            chooser.restart(module)
            for _ in range(2):
                chooser.add(chooser.turn(module, (torch.zeros(1, 2),), {}, 0.0), seconds, now=0.0)
        family = chooser._families.of(module)
        del module
    (decision,) = family.unfinished.values()
    assert min(samples.shortest for samples in decision.samples.values()) == 1.0
