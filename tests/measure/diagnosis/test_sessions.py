"""A session in this process, driven as the hooks drive it: what makes steps, and what it leaves."""

import json
import multiprocessing
import os
import sys
import threading
import weakref

import pytest
import torch

from cpulaunch.records.torch_settings import (
    FAILED,
    FIGURES,
    IN_THREADS,
    LOADED,
    STEPPING,
    DiagnosisRequest,
    figures_name,
)
from cpulaunch.worker.diagnosis import counters, phases
from cpulaunch.worker.diagnosis import session as sessions
from cpulaunch.worker.diagnosis import window as windows
from cpulaunch.worker.diagnosis.activity import Activity
from cpulaunch.worker.diagnosis.sampler import LineSampler
from cpulaunch.worker.diagnosis.session import Session
from cpulaunch.worker.diagnosis.window import OTHER_PROFILER, ProfilerWindow
from tests.launch.launching import eventually

CALLS = 3000


@pytest.fixture(autouse=True)
def samplers(monkeypatch):
    """The samplers of a test, which end with it: they would look at the frames of later ones."""
    made = []
    monkeypatch.setattr(sessions, "LineSampler", lambda activity: made.append(LineSampler(activity)) or made[-1])
    yield
    for each in made:
        each.stop()


@pytest.fixture
def session(tmp_path):
    return Session(DiagnosisRequest(folder=str(tmp_path), steps=2, warm_up=1, phase_seconds=0.001), 0)


def calls_modules(session, count=CALLS):
    for _ in range(count):
        torch.ones(4).add(1)
        session.ended("module", 1)


def states(tmp_path):
    return {name for name in (LOADED, IN_THREADS, STEPPING) for _ in tmp_path.glob(f"{name}*")}


def test_a_measured_process_goes_on(session, tmp_path):
    calls_modules(session)
    (found,) = tmp_path.glob(f"{FIGURES}*")
    written = json.loads(found.read_text())
    assert (written["steps"] > 0, written["participants"]) == (True, 1)
    assert written["started"] <= written["ended"]
    assert states(tmp_path) == {STEPPING}
    calls_modules(session)


def until(session, phase):
    """Effect: modules are called until this phase begins."""
    for _ in range(CALLS):
        if session._phases.name == phase:
            return
        torch.ones(4).add(1)
        session.ended("module", 1)
    raise AssertionError(session._phases.name)


def test_what_a_program_does_after_its_last_step_does_not_count(tmp_path):
    session = Session(DiagnosisRequest(folder=str(tmp_path), steps=1000, warm_up=1), 0)
    until(session, phases.BEFORE)
    for _ in range(10):
        session.ended("module", 1)
    session.activity.totals["data_seconds"] += 1000  # A DataLoader of an evaluation that calls no module again.
    session.at_exit()
    (found,) = tmp_path.glob(f"{FIGURES}*")
    written = json.loads(found.read_text())
    assert written["steps"] == 9
    assert written["sums"]["data_seconds"] == 0
    assert 0 <= written["sums"]["thread_cpu"] < 10


def test_waiting_for_a_cpu_while_counting_is_no_part_of_a_step(tmp_path, monkeypatch):
    delay = [0.0]

    def take_the_cpu():
        delay[0] += 1
        return {}

    monkeypatch.setattr(counters, "_delays", take_the_cpu)
    monkeypatch.setattr(sessions, "thread_delay", lambda: delay[0])
    session = Session(DiagnosisRequest(folder=str(tmp_path), steps=1000, warm_up=1), 0)
    until(session, phases.BEFORE)
    for _ in range(10):
        delay[0] += 0.25
        session.ended("module", 1)
    session.at_exit()
    (found,) = tmp_path.glob(f"{FIGURES}*")
    written = json.loads(found.read_text())
    assert (written["steps"], written["sums"]["thread_delay"]) == (9, 9 * 0.25)


def test_a_forked_process_of_multiprocessing_that_ends_early_leaves_figures(tmp_path):
    session = Session(DiagnosisRequest(folder=str(tmp_path), steps=1000, warm_up=1), 0)

    def few_steps():
        session.reset()  # As the hook on forks does.
        for _ in range(6):
            session.ended("module", 1)

    child = multiprocessing.get_context("fork").Process(target=few_steps)
    child.start()
    child.join()
    written = json.loads((tmp_path / figures_name(FIGURES, 0, child.pid)).read_text())
    assert (child.exitcode, written["seen_steps"]) == (0, 5)
    assert not list(tmp_path.glob(f"{FIGURES}*-{os.getpid()}*"))


def test_a_training_after_an_evaluation_is_seen_by_the_profiler(session):
    until(session, phases.PROFILED)
    assert torch.autograd._profiler_enabled()
    session.ended("optimizer", 2)
    assert session._phases.name == phases.WARM_UP
    assert not torch.autograd._profiler_enabled()
    for _ in range(CALLS):
        session.ended("optimizer", 2)
    assert (session._marker.kind, session._window.failure) == ("optimizer", "")


def test_a_measurement_that_fails_does_not_end_the_program(session, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("no counters")

    monkeypatch.setattr(session, "_figures", fail)
    calls_modules(session)
    (found,) = tmp_path.glob(f"{FAILED}*")
    assert found.read_text() == "RuntimeError: no counters"
    assert not torch.autograd._profiler_enabled()
    session.at_exit()
    assert list(tmp_path.glob(f"{FIGURES}*")) == []


def test_a_process_forked_while_the_profiler_runs_records_nothing():
    window = ProfilerWindow()
    window.start()
    try:
        window.abandon()
        for _ in range(100):
            torch.ones(4).add_(1)
    finally:
        torch.autograd._enable_record_function(True)
        window._profile.stop()
    assert not any(each.name() == "aten::add_" for each in window._profile.profiler.kineto_results.events())


def test_modules_in_a_loader_worker_make_no_steps(session, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    calls_modules(session)
    assert list(tmp_path.iterdir()) == []


def test_modules_that_prepare_samples_make_no_steps(session, tmp_path):
    session.activity.now = "data"
    calls_modules(session)
    assert list(tmp_path.iterdir()) == []


def in_a_thread(session, count):
    thread = threading.Thread(target=calls_modules, args=(session, count))
    thread.start()
    thread.join()


def test_calls_in_other_threads_are_known(session, tmp_path):
    session.loaded()
    in_a_thread(session, 2)
    assert states(tmp_path) == {LOADED, IN_THREADS}


def test_steps_of_a_thread_are_measured_where_the_first_thread_makes_none(session, tmp_path):
    session.ended("module", 1)
    in_a_thread(session, CALLS)
    (found,) = tmp_path.glob(f"{FIGURES}*")
    written = json.loads(found.read_text())
    assert (written["steps"] > 0, written["window_failure"]) == (True, "")
    assert written["window"]["calls"]["forward"] > 0


def test_threads_of_one_call_each_are_not_taken_for_one(session, tmp_path):
    """Python gives the identifier of a thread that has ended to the next one."""
    identifiers = set()
    for _ in range(50):
        thread = threading.Thread(target=calls_modules, args=(session, 1))
        thread.start()
        identifiers.add(thread.ident)
        thread.join()
    assert len(identifiers) < 50
    assert states(tmp_path) == {IN_THREADS}


def test_threads_after_the_measured_one_add_no_steps_to_it(tmp_path):
    session = Session(DiagnosisRequest(folder=str(tmp_path), steps=1000, warm_up=1), 0)
    in_a_thread(session, 20)
    seen = session._seen
    for _ in range(20):
        in_a_thread(session, 1)
    assert 0 < session._seen == seen
    assert not session._sampler._is_alive()


def test_threads_that_call_no_modules_are_beside_the_steps(session):
    done = threading.Event()
    ids = {}

    def stays(name, *calls):
        ids[name] = threading.get_native_id()
        for kind in calls:
            session.ended(kind, 1)
        ready.wait()
        done.wait()

    ready = threading.Barrier(5)
    programs = {"reads": (), "loads": ("loader",), "calls": ("module",), "differentiates": ("backward",)}
    started = [threading.Thread(target=stays, args=(name, *calls)) for name, calls in programs.items()]
    for each in started:
        each.start()
    session._sampler.start()
    ready.wait()
    found = session._beside_steps()
    done.set()
    for each in started:
        each.join()
    assert {ids["reads"], ids["loads"]} <= found
    assert not found & {threading.get_native_id(), ids["calls"], ids["differentiates"]}
    assert session._sampler._thread.native_id not in found


def test_what_a_thread_waits_for_a_cpu_is_part_of_what_it_wants():
    before = [{"id": 7, "seconds": 1.0, "delay": 0.5, "cpus": "0"}]
    after = [
        {"id": 7, "seconds": 2.0, "delay": 2.0, "cpus": "0"},
        {"id": 8, "seconds": 0.5, "delay": 0.0, "cpus": "1"},
        {"id": 9, "seconds": 0.0, "delay": 0.0, "cpus": "1"},
    ]
    assert sessions._busy_between(before, after, {8}) == [
        {"seconds": 1.0, "delay": 1.5, "cpus": "0", "is_beside": False},
        {"seconds": 0.5, "delay": 0.0, "cpus": "1", "is_beside": True},
    ]


def test_a_failure_in_another_thread_does_not_end_the_program(session, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no choice")

    monkeypatch.setattr(session._choice, "takes_over", fail)
    found = []
    thread = threading.Thread(target=lambda: found.append(session.ended("module", 1)))
    thread.start()
    thread.join()
    assert found == [None]
    (written,) = tmp_path.glob(f"{FAILED}*")
    assert written.read_text() == "RuntimeError: no choice"


def test_a_call_while_another_thread_is_chosen_does_not_count(session, monkeypatch):
    restart, calls = session._restart, []

    def calls_a_module():
        calls.append(session._seen)
        if len(calls) == 1:
            for _ in range(10):
                session.ended("optimizer", 2)
        restart()

    monkeypatch.setattr(session, "_restart", calls_a_module)
    in_a_thread(session, 3)
    assert (calls, session._seen, session._marker.kind) == ([0], 0, "")


def test_the_sampler_keeps_nothing_that_a_function_has_held():
    """Activations of the program would stay in memory, and weights in use."""
    activity, kept, done, left = Activity(), [], threading.Event(), []
    sampler = LineSampler(activity)

    def measured():
        held = torch.ones(4)
        kept.append(weakref.ref(held))
        activity.measure_this_thread()
        sampler.start()
        done.wait()

    class Stop(threading.Event):
        def wait(self, timeout=None):
            if not sampler._counts:
                return super().wait(timeout)
            done.set()
            thread.join()
            left.append(kept[0]())
            return True

    sampler._stop, thread = Stop(), threading.Thread(target=measured)
    thread.start()
    try:
        eventually(lambda: left, "a look at the function")
    finally:
        done.set()
    assert left == [None]


def samples_in(generator):
    """What the sampler says that the innermost frame of the generator does."""
    sampler = LineSampler(Activity())
    frames = []

    def looked():
        frames.append(sys._getframe())
        return sampler

    for _ in generator(looked):
        pass
    return sampler._place(frames[-1])[0]


def test_a_generator_makes_samples_unless_steps_end_in_it():
    def makes_samples(looked):
        yield looked()

    def streams(looked):
        sampler = looked()
        sampler.exclude(sys._getframe())
        yield looked()

    class Reader:
        def __init__(self, looked):
            self.looked, self.left = looked, 2

        def __iter__(self):
            return self

        def __next__(self):
            self.left -= 1
            if not self.left:
                raise StopIteration
            return self.looked()

    class Streamed(Reader):
        def __next__(self):
            self.left -= 1
            if not self.left:
                raise StopIteration
            self.looked().exclude(sys._getframe())

    assert samples_in(makes_samples) == samples_in(Reader) == "generator"
    assert samples_in(streams) == samples_in(Streamed) == ""


def test_a_window_of_too_many_events_ends_with_the_last_that_is_looked_at(monkeypatch):
    monkeypatch.setattr(windows, "MOST_EVENTS", 200)
    window = ProfilerWindow()
    window.start()
    with torch._C._profiler._RecordFunctionFast("cpulaunch::module"):
        for _ in range(1000):
            torch.ones(4).add_(1)
    window.stop()
    found = window.sums()
    assert 0 < found["part"] < 0.7
    assert found["calls"]["all"] >= 40
    assert found["pauses"] < 0.5 * found["seconds"]
    assert found["calls"]["outside"] == 0


def test_the_programs_own_profiler_is_alone():
    window = ProfilerWindow()
    window.start()
    window.give_way()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.ones(4).add_(1)
        other = ProfilerWindow()
        other.start()
        other.stop()
    window.stop()
    assert any(each.key == "aten::add_" for each in own.key_averages())
    assert (window.failure, window.sums()) == (OTHER_PROFILER, None)
    assert (other.failure, other.sums()) == (OTHER_PROFILER, None)
    assert window.next().failure == OTHER_PROFILER
