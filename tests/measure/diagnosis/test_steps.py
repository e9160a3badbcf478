"""Which calls end a step, and when a phase of the measurement is over."""

import pytest

from cpulaunch.records.torch_settings import DiagnosisRequest, decode_request, encode_request
from cpulaunch.worker.diagnosis.marker import LOST, LOST_BELOW, StepMarker
from cpulaunch.worker.diagnosis.phases import AFTER, BEFORE, DONE, PROFILED, WARM_UP, Phases
from cpulaunch.worker.diagnosis.thread_choice import MOST_THREADS, SILENT_SECONDS, ThreadChoice


def ends(calls):
    """The calls, (kind, key), with which a step ends."""
    marker = StepMarker()
    return [number for number, (kind, key) in enumerate(calls) if marker.ends_step(kind, key)]


def test_an_inference_makes_a_step_with_each_call_of_its_module():
    assert ends([("module", 1)] * 4) == [1, 2, 3]


def test_a_module_that_is_called_once_ends_no_step():
    assert ends([("module", 1), *[("module", 2)] * 3]) == [2, 3]


def test_a_training_makes_a_step_with_each_step_of_its_optimizer():
    step = [("loader", ""), ("module", 1), ("module", 2), ("backward", ""), ("optimizer", 3)]
    assert ends(step * 3) == [4, 9, 14]


def test_gradients_may_be_accumulated_before_the_first_step():
    micro = [("module", 1), ("backward", "")]
    calls = [*micro * 4, ("optimizer", 2)] * 3
    assert ends(calls)[-3:] == [8, 17, 26]


def test_of_two_optimizers_one_ends_the_steps():
    step = [("optimizer", 1), ("optimizer", 2)]
    assert ends(step * 4) == [0, 2, 4, 6]


def test_another_module_takes_over_when_the_first_is_not_called_any_more():
    calls = [*[("module", 1)] * 3, *[("module", 2)] * (LOST + 2)]
    assert ends(calls)[2:] == [len(calls) - 3, len(calls) - 2, len(calls) - 1]


def test_an_evaluation_after_a_training_has_steps_of_its_own():
    calls = [("optimizer", 1), *[("module", 2)] * (LOST_BELOW + 1)]
    assert ends(calls) == [0, LOST_BELOW, LOST_BELOW + 1]


def timed_ends(calls):
    """The calls, (kind, key, seconds), with which a step ends."""
    marker = StepMarker()
    return [number for number, (kind, key, seconds) in enumerate(calls) if marker.ends_step(kind, key, seconds)]


@pytest.mark.parametrize("samples", [4, 64, 2000])
def test_a_module_for_each_sample_is_no_step(samples):
    batch = [*[("module", "transform", 1e-6)] * samples, ("module", "model", 0.1)]
    found = timed_ends(batch * 8)
    last_of_each = [len(batch) * number - 1 for number in range(4, 9)]
    assert found[-len(last_of_each) :] == last_of_each


def test_a_cell_that_takes_most_of_the_time_stays_the_step():
    sequence = [*[("module", "cell", 1e-3)] * 30, ("module", "head", 1e-3)]
    assert len(timed_ends(sequence * 10)) == 30 * 10 - 1


def test_modules_called_equally_often_do_not_take_turns():
    step = [("module", "encoder", 0.1), ("module", "decoder", 0.9)]
    assert timed_ends(step * 20) == list(range(2, 40, 2))


def test_gradients_may_be_accumulated_over_many_batches():
    marker = StepMarker()
    micro = [("module", 1), ("backward", "")] * 800
    changes = []
    for _ in range(5):
        for kind, key in [*micro, ("optimizer", 2)]:
            marker.ends_step(kind, key)
        assert marker.kind == "optimizer"
        changes.append(marker.changes)
    assert changes[1:] == [changes[1]] * 4


def test_a_program_without_modules_has_steps_by_its_backward_passes():
    assert ends([("backward", "")] * 3) == [1, 2]


def walked(request, seconds):
    phases = Phases(request)
    names = []
    while phases.name != DONE and len(names) < 10_000:
        names.append(phases.name)
        phases.add(seconds)
    return {name: names.count(name) for name in (WARM_UP, BEFORE, PROFILED, AFTER)}


@pytest.mark.parametrize(
    ("seconds", "counts"),
    [
        (0.1, (5, 10, 1, 10)),
        (0.01, (5, 50, 5, 50)),
        (0.0001, (5, 1000, 20, 1000)),
        (20.0, (3, 2, 1, 2)),
    ],
)
def test_short_steps_are_measured_more_often_and_long_ones_less(seconds, counts):
    assert tuple(walked(DiagnosisRequest(folder=""), seconds).values()) == pytest.approx(counts, abs=1)


def test_the_profiler_sees_a_twentieth_of_the_steps_time_at_most():
    for seconds in (0.0001, 0.001, 0.01, 0.1, 1.0):
        counts = walked(DiagnosisRequest(folder=""), seconds)
        assert counts[PROFILED] <= 1 + (counts[BEFORE] + counts[AFTER]) / 20


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.2])
def test_steps_are_measured_until_the_profiler_adds_less_than_a_tenth(seconds):
    phases, spent, added = Phases(DiagnosisRequest(folder="")), 0.0, 0.0
    while phases.name != DONE:
        slow = 10 * seconds if phases.name == PROFILED else seconds
        if phases.name != WARM_UP:
            spent, added = spent + slow, added + slow - seconds
        phases.add(slow)
    assert added <= 0.1 * spent


def test_the_profiler_sees_several_steps_where_others_take_the_cpu():
    phases = Phases(DiagnosisRequest(folder=""))
    while phases.name != DONE:
        phases.add(0.1)
        phases.is_disturbed = phases.name == PROFILED
    assert [len(each.steps) for each in phases.finished] == [5, 10, 3, 10]
    phases.restart()
    assert not phases.is_disturbed


def test_of_long_steps_no_more_are_measured_though_the_profiler_adds_much():
    phases = Phases(DiagnosisRequest(folder=""))
    while phases.name != DONE:
        phases.add(400.0 if phases.name == PROFILED else 4.0)
    assert [len(each.steps) for each in phases.finished] == [5, 3, 1, 8]


THREADS = {
    "nothing was called before": ("module", "", 3, 0.0, [False, False, True]),
    "a training beside calls of modules": ("optimizer", "module", 1, 0.0, [True]),
    "calls of modules beside a training": ("module", "optimizer", 40, 60.0, [False] * 40),
    "two threads that call modules": ("module", "module", 40, 0.01, [False] * 40),
    "one that has fallen silent": ("module", "module", 20, SILENT_SECONDS + 1, [False] * 15 + [True] * 5),
}


@pytest.mark.parametrize("name", THREADS)
def test_which_thread_is_measured(name):
    kind, measured, calls, silent, expected = THREADS[name]
    choice = ThreadChoice()
    choice.heard(100.0)
    assert [choice.takes_over(7, kind, measured=measured, now=100.0 + silent) for _ in range(calls)] == expected


def test_a_call_of_the_measured_thread_begins_the_count_anew():
    choice = ThreadChoice()
    for _ in range(5):
        assert [choice.takes_over(7, "module", measured="", now=0.0) for _ in range(2)] == [False, False]
        choice.heard(0.0)


def test_a_server_may_start_any_number_of_threads():
    choice = ThreadChoice()
    for thread in range(3 * MOST_THREADS):
        assert not choice.takes_over(thread, "module", measured="", now=0.0)
    assert len(choice._calls) <= MOST_THREADS


def test_a_new_step_begins_with_a_new_warm_up():
    phases = Phases(DiagnosisRequest(folder=""))
    for _ in range(8):
        phases.add(0.1)
    phases.restart()
    assert (phases.name, phases.steps, phases.finished) == (WARM_UP, [], [])


def test_a_request_passes_through_its_variable():
    request = DiagnosisRequest(folder="/a b", steps=3, trace=True)
    assert decode_request(encode_request(request)) == request
    with pytest.raises(ValueError, match="not a JSON object"):
        decode_request("[]")
