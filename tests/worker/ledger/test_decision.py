"""The choice of a mode by durations: pure decisions, driven by made-up timings."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpulaunch.worker.ledger.account import START_UPS
from cpulaunch.worker.ledger.blocks import LENGTH, TRANSITION, BlockDecision
from cpulaunch.worker.ledger.decision import FIRST_WAIT, HOPELESS, MAX_UNSTEADY, MIN_GAIN, PLAIN, Decision
from cpulaunch.worker.ledger.module_ledger import MAX_SIGNATURES, ModuleLedger
from cpulaunch.worker.ledger.samples import WARM_UP, WINDOW, Samples

Timing = Callable[[str], float]


class Program:
    """Calls of one module with made-up durations: how many calls ran in each mode, and how long all took."""

    def __init__(self, modes: tuple[str, ...], *, in_blocks: bool = False) -> None:
        self.ledger = ModuleLedger()
        self.modes = modes
        self.in_blocks = in_blocks
        self.calls = dict.fromkeys(modes, 0)
        self.seconds = 0.0

    def run(self, number: int, timing: Timing, *, signature: object = "s") -> None:
        for _ in range(number):
            mode = self.ledger.next(signature, self.modes, in_blocks=self.in_blocks)
            seconds = timing(mode)
            self.calls[mode] += 1
            self.seconds += seconds
            self.ledger.add(signature, mode, seconds)

    def chosen(self, signature: object = "s") -> str | None:
        return self.ledger.decisions[signature].chosen


def times(**seconds: float) -> Timing:
    return lambda mode: seconds[mode]


def noisy(random_numbers: random.Random, **seconds: float) -> Timing:
    """Durations that other processes lengthen: often a little, sometimes a lot."""

    def timing(mode: str) -> float:
        spike = 1 + 9 * (random_numbers.random() < 0.05)
        return seconds[mode] * (1 + random_numbers.expovariate(30)) * spike

    return timing


BOTH = ("graph", PLAIN)
ALL = ("graph", "autocast", "weights", PLAIN)


def test_samples_give_the_lower_quartile_without_the_warm_up() -> None:
    samples = Samples()
    for seconds in (50.0,) * WARM_UP:
        samples.add(seconds)
    assert (samples.count, samples.estimate()) == (0, float("inf"))
    for seconds in (4.0, 1.0, 3.0, 2.0, 5.0):
        samples.add(seconds)
    assert samples.estimate() == 2.0
    for _ in range(WINDOW):
        samples.add(7.0)
    assert samples.estimate() == 7.0


@pytest.mark.parametrize("fastest", ALL)
def test_the_fastest_mode_is_chosen(fastest: str) -> None:
    program = Program(ALL)
    program.run(40, lambda mode: 1.0 if mode == fastest else 1.3)
    assert program.chosen() == fastest
    assert program.calls[fastest] > 15


def test_the_first_call_runs_in_the_mode_expected_to_be_best() -> None:
    assert Decision(ALL).next() == "graph"
    assert Decision((PLAIN,)).next() == PLAIN


@pytest.mark.parametrize(("graph", "expected"), [(1.0, PLAIN), (1 - MIN_GAIN / 2, PLAIN), (1 - 2 * MIN_GAIN, "graph")])
def test_another_mode_must_save_more_than_a_tie(graph: float, expected: str) -> None:
    program = Program(BOTH)
    program.run(30, times(graph=graph, plain=1.0))
    assert program.chosen() == expected


def test_noise_does_not_change_the_choice() -> None:
    for seed in range(50):
        program = Program(BOTH)
        program.run(2000, noisy(random.Random(seed), graph=0.008, plain=0.01))
        assert program.chosen() == "graph"
        assert program.calls[PLAIN] < 60


def test_a_slow_first_call_does_not_count() -> None:
    program, seen = Program(BOTH), set()

    def timing(mode: str) -> float:
        first = mode not in seen
        seen.add(mode)
        return 100.0 if first else {"graph": 0.5, PLAIN: 1.0}[mode]

    program.run(30, timing)
    assert program.chosen() == "graph"


def test_a_hopeless_mode_is_left_after_one_sample() -> None:
    program = Program(BOTH)
    program.run(1000, times(graph=0.6, plain=0.01))
    assert program.chosen() == PLAIN
    assert program.calls["graph"] == WARM_UP + 1


def test_a_hopeless_mode_of_long_calls_is_left_after_its_first_call() -> None:
    program = Program(ALL)
    program.run(30, times(graph=100.0, autocast=50.0, weights=40.0, plain=10.0))
    assert program.calls == {"graph": 1, "autocast": 1, "weights": 1, PLAIN: 27}


def test_a_slow_first_call_of_a_program_with_long_calls_does_not_make_a_mode_hopeless() -> None:
    decision = Decision(BOTH)
    for _ in range(30):
        mode = decision.next()
        decision.add(mode, {"graph": 20.0, PLAIN: 30.0}[mode] * (1.4 if decision.calls == 0 else 1.0))
    assert decision.chosen == "graph"


def test_a_mode_that_is_never_ready_is_decided_all_the_same() -> None:
    decision = Decision(BOTH)
    for _ in range(4 * MAX_UNSTEADY):
        mode = decision.next()
        decision.add(mode, 3.0 if mode == "graph" else 1.0, steady=mode == PLAIN)
    assert decision.chosen == PLAIN


def test_durations_of_preparation_do_not_count() -> None:
    decision, prepared = Decision(BOTH), 0
    while decision.chosen is None:
        mode = decision.next()
        steady = mode == PLAIN or prepared >= 3
        prepared += mode == "graph"
        decision.add(mode, 1.0 if mode == PLAIN else 0.5 if steady else 500.0, steady=steady)
    assert decision.chosen == "graph"


def test_a_postponed_mode_is_tried_later_and_may_win() -> None:
    """A capture that another process prepares for ten seconds; calls take 10 ms."""
    decision, asked, now = Decision(BOTH), [], 0.0
    while now < 40:
        mode = decision.next()
        asked.append(mode)
        is_pending = mode == "graph" and now < 10
        seconds = 0.01 if is_pending or mode == PLAIN else 0.005
        now += seconds
        if is_pending:
            decision.postpone(mode, seconds)
        else:
            decision.add(mode, seconds)
    assert 9 < asked[:900].count("graph") < 13
    assert decision.chosen == "graph"
    assert asked.count("graph") > 4000


def test_a_mode_chosen_by_others_that_is_only_postponed_leaves_the_choice_to_samples() -> None:
    decision = Decision(("graph", "weights", PLAIN), prior="graph")
    seconds, modes = {"weights": 0.5, PLAIN: 1.0}, []
    for _ in range(3000):
        modes.append(decision.next(1e9))
        if modes[-1] == "graph":
            decision.postpone("graph", 1.0)
        else:
            decision.add(modes[-1], seconds[modes[-1]])
    assert modes[-500:].count("weights") > 450


def test_a_regime_change_is_noticed() -> None:
    program = Program(BOTH)
    program.run(200, times(graph=0.5, plain=1.0))
    assert program.chosen() == "graph"
    before = program.calls[PLAIN]
    program.run(60, times(graph=3.0, plain=1.0))
    assert program.chosen() == PLAIN
    assert program.calls[PLAIN] > before + 20


@pytest.mark.parametrize("calls", [300, 1500, 5000])
def test_plain_is_found_again_where_all_other_modes_have_become_slower(calls: int) -> None:
    program = Program(ALL)
    program.run(calls, times(graph=8.0, autocast=0.8, weights=0.7, plain=1.0))
    assert program.chosen() == "weights"
    program.run(calls, times(graph=36.0, autocast=3.3, weights=3.0, plain=1.0))
    assert program.chosen() == PLAIN
    assert program.calls[PLAIN] > 0.8 * calls


def test_plain_is_found_again_soon_after_it_was_slower_for_a_while() -> None:
    program = Program(BOTH)
    program.run(60, times(graph=1.1, plain=1.0))
    program.run(40, times(graph=1.1, plain=2.0))
    assert program.chosen() == "graph"
    program.run(90, times(graph=1.1, plain=1.0))
    assert program.chosen() == PLAIN


def test_a_machine_that_becomes_slower_altogether_changes_nothing() -> None:
    program = Program(BOTH)
    program.run(200, times(graph=0.5, plain=1.0))
    program.run(3000, times(graph=1.5, plain=3.0))
    assert program.chosen() == "graph"
    assert program.calls[PLAIN] < 40


def test_a_mode_that_wins_only_because_the_machine_has_become_quicker_is_not_chosen() -> None:
    program = Program(BOTH)
    program.run(1000, times(graph=1.05e-3, plain=1e-3))
    graph_calls = program.calls["graph"]
    for _ in range(20):
        program.run(2000, times(graph=1.05e-3, plain=1e-3))
        decision = program.ledger.decisions["s"]
        trials = program.calls["graph"]
        while program.calls["graph"] == trials:  # Until a trial begins: a burst of other work ends just then.
            program.run(1, times(graph=0.7e-3, plain=1e-3))
        for _ in range(100):
            program.run(1, times(graph=0.7e-3, plain=0.667e-3))
            assert decision.chosen == PLAIN
    assert program.calls["graph"] > graph_calls


@pytest.mark.parametrize(("gain", "spells"), [(0.1, (1.0, 3.0)), (0.1, (1.0, 1.3)), (0.3, (1.0, 3.0))])
def test_noise_and_spells_of_other_work_do_not_bring_plain_back(gain: float, spells: tuple[float, float]) -> None:
    share = 0.0
    for seed in range(3):
        numbers, program, spell = random.Random(seed), Program(BOTH), [1.0]

        def timing(mode: str, numbers=numbers, spell=spell) -> float:
            typical = 1e-3 * (1 - gain if mode == "graph" else 1.0)
            return typical * spell[0] * (1 + abs(numbers.gauss(0, 0.08)))

        for number in range(15_000):
            spell[0] = numbers.uniform(*spells) if number % 20 == 0 else spell[0]
            program.run(1, timing)
        share += program.calls[PLAIN] / 15_000 / 3
    assert share < 0.05


def test_a_mode_that_is_removed_while_another_one_is_tried_leaves_a_choice_that_is_tested() -> None:
    decision = Decision(("graph", "autocast", PLAIN))
    seconds = {"graph": 0.5, "autocast": 0.7, PLAIN: 1.0}
    for _ in range(100):
        mode = decision.next(0.0)
        decision.add(mode, seconds[mode])
    assert decision.chosen == "graph"
    while decision.next(1e9) != "autocast":
        decision.add(decision.next(1e9), seconds[decision.next(1e9)])
    decision.remove("graph")
    while decision.chosen is None:
        mode = decision.next(1e9)
        decision.add(mode, seconds[mode])
    assert decision.chosen == "autocast"
    seconds["autocast"] = 6.0
    modes = []
    for _ in range(200):
        modes.append(decision.next(1.0))
        decision.add(modes[-1], seconds[modes[-1]])
    assert modes[-50:].count(PLAIN) == 50


def test_plain_is_tried_soon_after_other_work_has_ended() -> None:
    """A mode that reads less memory wins while others use the memory, but not on a quiet machine."""
    program = Program(BOTH)
    program.run(100_000, times(graph=1e-3, plain=1.5e-3))
    assert program.chosen() == "graph"
    program.run(200, times(graph=0.5e-3, plain=0.45e-3))
    assert program.chosen() == PLAIN


def test_a_loser_that_becomes_faster_is_found() -> None:
    program = Program(BOTH)
    program.run(500, times(graph=1.3, plain=1.0))
    assert program.chosen() == PLAIN
    program.run(20 * FIRST_WAIT, times(graph=0.5, plain=1.0))
    assert program.chosen() == "graph"


def test_losers_are_tried_ever_more_rarely() -> None:
    program = Program(BOTH)
    program.run(100_000, times(graph=1.3, plain=1.0))
    assert 10 < program.calls["graph"] < 60


def test_a_mode_that_is_removed_is_not_used_again() -> None:
    program = Program(BOTH)
    program.run(100, times(graph=0.5, plain=1.0))
    program.ledger.remove("graph")
    before = program.calls["graph"]
    program.run(1000, times(graph=0.5, plain=1.0))
    program.run(100, times(graph=0.5, plain=1.0), signature="other")
    assert program.calls["graph"] == before
    assert program.chosen("other") == PLAIN


# Noise, and calls that take seconds


def machine(numbers: random.Random, timing: Timing) -> Timing:
    """Durations with log-normal noise of 10 %, in bursts of other work that last 0.5 s twice as long."""
    now, burst = [0.0], [numbers.expovariate(0.2)]

    def noisy_timing(mode: str) -> float:
        started, left = now[0], timing(mode) * numbers.lognormvariate(0, 0.1)
        while left > 0:
            is_burst = now[0] >= burst[0]
            until = burst[0] + 0.5 if is_burst else burst[0]
            done = min(left, (until - now[0]) / (1 + is_burst))
            left -= done
            now[0] += done * (1 + is_burst)
            if is_burst and left > 0:
                burst[0] = until + numbers.expovariate(0.2)
        return now[0] - started

    return noisy_timing


def losses(base: float, factor: float, *, until: float, in_blocks: bool = False) -> list[tuple[float, float]]:
    """For several seeds, the seconds lost to a slower mode in the first `until` seconds, and in as many after them."""
    found = []
    for seed in range(12):
        program, split = Program(BOTH, in_blocks=in_blocks), 0.0
        timing = machine(random.Random(seed), times(graph=base * factor, plain=base))
        while program.seconds < 2 * until:
            program.run(1, timing)
            split = split or (program.calls["graph"] if program.seconds >= until else 0.0)
        excess = base * (factor - 1)
        found.append((split * excess, (program.calls["graph"] - split) * excess))
    return found


@pytest.mark.parametrize("base", [0.1, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("factor", [1.1, 1.2, 1.3, 1.5])
def test_a_slower_mode_costs_seconds_at_the_start_and_little_later(base: float, factor: float) -> None:
    found = losses(base, factor, until=30.0)
    start, later = (sum(each) / len(found) for each in zip(*found, strict=True))
    assert start < 1.5 + base * (factor - 1)
    assert later < 0.02 * 30


@pytest.mark.parametrize("base", [0.3, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("factor", [1.1, 1.3, 1.5])
def test_training_with_a_slower_mode_costs_seconds_at_the_start_and_little_later(base: float, factor: float) -> None:
    found = losses(base, factor, until=600.0, in_blocks=True)
    start, later = (sum(each) / len(found) for each in zip(*found, strict=True))
    assert start < 5 + base * (factor - 1)
    assert later < 0.02 * 600


def test_plain_is_known_after_two_steps_that_take_long() -> None:
    decision, modes = BlockDecision(BOTH), []
    for _ in range(3):
        modes.append(decision.next())
        decision.add(modes[-1], 45.0 if modes[-1] == "graph" else 30.0)
    assert modes == ["graph", PLAIN, PLAIN]
    assert decision.chosen == PLAIN


# Short calls


def cold(seconds: dict[str, float], *, factor: float) -> Timing:
    """Durations whose first calls after those in another mode take longer: the caches have other weights."""
    last, number = [""], [0]

    def timing(mode: str) -> float:
        number[0] = number[0] + 1 if mode == last[0] else 0
        last[0] = mode
        return seconds[mode] * (1 + (factor - 1) * 0.7 ** number[0])

    return timing


@pytest.mark.parametrize(("graph", "plain", "factor"), [(150e-6, 300e-6, 9.0), (2e-3, 3e-3, 5.0), (4e-3, 6e-3, 4.0)])
def test_caches_that_hold_the_weights_of_another_mode_do_not_decide(graph: float, plain: float, factor: float) -> None:
    """A mode that gains most from its caches is the slower one in its first calls."""
    program = Program(BOTH)
    timing = cold({"graph": graph, PLAIN: plain}, factor=factor)
    program.run(20_000, lambda mode: timing(mode) if mode == "graph" else min(timing(mode), plain))
    assert program.chosen() == "graph"
    assert program.calls["graph"] > 19_500


def test_calls_that_are_not_measured_warm_the_caches_up() -> None:
    counts = []
    for unmeasured in (0, 100):
        decision = Decision(BOTH, prior=PLAIN)
        for mode in (*[PLAIN] * 20, "graph"):
            decision.add(mode, 0.001)
        before = decision.samples[PLAIN].count
        decision.skip(unmeasured)
        decision.add(PLAIN, 0.001)
        counts.append(decision.samples[PLAIN].count - before)
    assert counts == [0, 1]


def test_calls_with_warm_caches_count_soon() -> None:
    samples = Samples()
    for _ in range(4):
        samples.add(0.001)
    assert samples.count == 1


def test_trials_of_short_calls_wait_until_they_may_cost_what_they_do() -> None:
    program, most = Program(BOTH), 0.0
    program.run(40, times(graph=4.9e-3, plain=1e-4))
    start = program.calls["graph"]
    for _ in range(200):
        program.run(100, times(graph=4.9e-3, plain=1e-4))
        cost = (program.calls["graph"] - start) * 4.8e-3
        most = max(most, cost / program.seconds)
    assert most < 0.03


def test_a_busy_start_does_not_rule_a_mode_of_short_calls_out() -> None:
    """Another program has the CPUs for ten seconds, in which a mode of many parallel regions is far slower."""
    program = Program(BOTH)
    program.run(20_000, times(graph=1600e-6, plain=500e-6))
    assert program.chosen() == PLAIN
    assert not program.ledger.is_useless("graph")
    program.run(200_000, times(graph=200e-6, plain=300e-6))
    assert program.chosen() == "graph"


def test_a_burst_in_the_first_calls_of_a_mode_does_not_rule_it_out() -> None:
    program, calls = Program(BOTH), [0]

    def timing(mode: str) -> float:
        calls[0] += 1
        return {"graph": 0.08, PLAIN: 0.1}[mode] * (2 if calls[0] <= 2 else 1)

    program.run(20, timing)
    assert program.chosen() == PLAIN
    assert not program.ledger.is_useless("graph")
    program.run(400, timing)
    assert program.chosen() == "graph"


def test_one_disturbed_sample_of_a_short_call_is_not_the_last() -> None:
    program, calls = Program(BOTH), [0]

    def timing(mode: str) -> float:
        calls[0] += 1
        return 0.0004 if mode == "graph" and calls[0] <= 11 else {"graph": 0.0001, PLAIN: 0.0002}[mode]

    program.run(200, timing)
    assert program.chosen() == "graph"


def test_a_mode_of_short_calls_that_loses_for_a_minute_is_useless() -> None:
    program = Program(BOTH)
    program.run(400_000, times(graph=1600e-6, plain=300e-6))
    assert program.ledger.is_useless("graph")
    assert program.calls["graph"] * 1300e-6 < 0.02 * 120


# Many signatures


def test_thousands_of_signatures_share_one_start_up() -> None:
    program = Program(BOTH)
    for number in range(5000):
        program.run(1, times(graph=5.0, plain=1.0), signature=number)
    assert len(program.ledger.decisions) == MAX_SIGNATURES
    assert program.seconds < 5000 * 1.01 + 4 * 10


@pytest.mark.parametrize("number", [MAX_SIGNATURES + 1, MAX_SIGNATURES + 8])
@pytest.mark.parametrize("graph", [0.7, 1.3])
def test_signatures_in_turn_find_the_faster_mode(number: int, graph: float) -> None:
    program = Program(BOTH)
    program.run(300, times(graph=1 / graph, plain=1.0), signature=0)
    before = 0
    for call in range(40_000):
        before = before if call >= 20_000 else program.calls["graph"]
        program.run(1, times(graph=graph, plain=1.0), signature=call % number)
    share = (program.calls["graph"] - before) / 20_000
    assert share > 0.9 if graph < 1 else share < 0.1


def test_later_signatures_begin_with_the_mode_of_the_others() -> None:
    program = Program(BOTH)
    for number in range(4):
        program.run(50, times(graph=0.5, plain=1.0), signature=number)
    assert program.ledger.next("new", BOTH) == "graph"


def test_a_mode_is_useless_once_no_signature_that_matters_uses_it() -> None:
    program = Program(BOTH)
    program.run(50, times(graph=2.0, plain=1.0))
    program.run(2, times(graph=2.0, plain=1.0), signature="rare")
    assert program.ledger.is_useless("graph")
    program.run(50, times(graph=0.5, plain=1.0), signature="good")
    assert not program.ledger.is_useless("graph")


def test_a_mode_that_is_only_a_little_slower_must_lose_twice_to_be_useless() -> None:
    program = Program(BOTH)
    program.run(50, times(graph=1.2, plain=1.0))
    assert program.chosen() == PLAIN
    assert not program.ledger.is_useless("graph")
    program.run(4 * FIRST_WAIT, times(graph=1.2, plain=1.0))
    assert program.ledger.is_useless("graph")


def test_a_mode_that_has_not_been_sampled_yet_is_not_useless() -> None:
    ledger = ModuleLedger()
    for _ in range(50):
        mode = ledger.next("s", BOTH)
        if mode == "graph":
            ledger.postpone("s", mode, 1.0)
        else:
            ledger.add("s", mode, 1.0)
    assert ledger.decisions["s"].chosen == PLAIN
    assert not ledger.is_useless("graph")


# Training steps


def test_training_is_decided_by_whole_blocks_of_steps() -> None:
    """Two calls in each step: a short time until the second one, and a long one until the next step."""
    for autocast, expected in ((0.8, "autocast"), (1.2, PLAIN)):
        program, calls = Program(("autocast", PLAIN), in_blocks=True), [0]

        def timing(mode: str, factor: float = autocast, calls: list[int] = calls) -> float:
            calls[0] += 1
            return (0.1 if calls[0] % 2 else 1.0) * (factor if mode == "autocast" else 1.0)

        program.run(100, timing)
        assert program.chosen() == expected


@pytest.mark.parametrize("epoch", [12, 20, 33])
def test_pauses_between_steps_do_not_rule_a_mode_out(epoch: int) -> None:
    """A checkpoint or the first data of an epoch, whose steps are few, take as long as fifty steps."""
    for offset in range(epoch):
        program, calls = Program(("autocast", PLAIN), in_blocks=True), [offset]

        def timing(mode: str, calls: list[int] = calls) -> float:
            calls[0] += 1
            return {"autocast": 0.07, PLAIN: 0.1}[mode] + 5.0 * (calls[0] % epoch == 0)

        program.run(1000, timing)
        assert program.calls["autocast"] > 800


def test_a_hopeless_mode_ends_its_block_early() -> None:
    decision = BlockDecision((PLAIN, "autocast"))
    modes = []
    while decision.chosen is None:
        modes.append(decision.next())
        decision.add(modes[-1], 9.0 if modes[-1] == "autocast" else 1.0)
    assert decision.chosen == PLAIN
    assert modes.count("autocast") < LENGTH + TRANSITION


# What trying costs


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(ALL[:3]), st.floats(0.3, 70.0), min_size=1),
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.booleans(),
    st.floats(0.0, 0.3),
)
def test_the_excess_over_the_plain_program_is_bounded(slowdowns, seed, signatures, in_blocks, noise) -> None:
    """At most 2 % of the plain program's time, and the start-up, however slow the modes are.

    The start-up of a signature are two calls in each mode (or as many blocks), and a few more in those that are not
    hopeless.
    """
    numbers = random.Random(seed)
    factors = {**slowdowns, PLAIN: 1.0}
    modes = tuple(mode for mode in ALL if mode in factors)
    program, excess, number = Program(modes, in_blocks=in_blocks), 0.0, 3000
    for _ in range(number):
        before = program.calls.copy()
        signature = min(int(numbers.expovariate(0.3)), signatures)
        program.run(1, lambda mode: factors[mode] * (1 + noise * numbers.random()), signature=signature)
        mode = next(each for each in modes if program.calls[each] != before[each])
        excess += factors[mode] - 1.0
    calls = LENGTH + TRANSITION if in_blocks else 1
    start_up = sum(max(factor - 1, 0) * 2 + 6 * max(min(factor, HOPELESS) - 1, 0) for factor in factors.values())
    assert excess <= 0.02 * number + START_UPS * calls * start_up


@pytest.mark.parametrize("ranks", [1, 8])
def test_ranks_share_what_trials_may_cost(ranks: int) -> None:
    """Each of them waits for the slowest one at every step."""
    ledger, seconds, calls = ModuleLedger(), times(graph=1.4, plain=1.0), {"graph": 0, PLAIN: 0}
    for number in range(40_000):
        mode = ledger.next("s", BOTH, in_blocks=True, ranks=ranks)
        calls[mode] += number > 1000
        ledger.add("s", mode, seconds(mode))
    assert 0 < calls["graph"] * 0.4 * ranks < 0.011 * 40_000


def test_signatures_called_once_count_as_decided_after_the_start_ups_where_a_mode_was_removed_too() -> None:
    """Else a server whose shapes are ever new ones would be measured for good."""
    ledger, modes = ModuleLedger(), ("autocast", "weights", "plain")
    ledger.remove("weights")
    for number in range(60):
        for _ in range(40 if number < 5 else 1):
            mode = ledger.next(number, modes)
            ledger.add(number, mode, 1.0 if mode == "plain" else 2.0)
    assert ledger.has_decided(range(60))
    assert all(ledger.decisions[number].chosen == "plain" for number in range(60))
