"""When the processes of a program have been measured, and which of them a diagnosis is about."""

import json
from functools import partial

import pytest

from cpulaunch.measure.diagnosis.diagnosis import Ending, diagnosis_of
from cpulaunch.measure.diagnosis.folder import (
    failed_processes,
    read_failure,
    read_folder,
    read_states,
    stepping_processes,
)
from cpulaunch.measure.diagnosis.progress import LEAST_WAIT_SECONDS, Measurement
from cpulaunch.measure.diagnosis.rates import NO_CEILINGS
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import replace
from cpulaunch.records.torch_settings import FAILED, FIGURES, IN_THREADS, LOADED, STEPPING
from tests.measure.diagnosis.given import data, figures
from tests.measure.diagnosis.test_bottlenecks import MACHINE

READERS = (read_folder, read_states, read_failure, stepping_processes, failed_processes)


class Watched:
    """A folder in which processes write, and the measurement that watches it."""

    def __init__(self, folder):
        self.folder = folder
        self.now = 0.0
        self.alive = set()
        self.measurement = Measurement(str(folder), clock=lambda: self.now, is_alive=lambda pid: pid in self.alive)

    def begins(self, pid):
        (self.folder / f"{STEPPING}{pid}").touch()
        self.alive.add(pid)

    def is_measured(self, pid, **changes):
        (self.folder / f"{FIGURES}{pid}.json").write_text(json.dumps(data(pid=pid, **changes)))

    def after(self, seconds):
        self.now += seconds
        return self.measurement.is_complete()


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_a_single_process_is_enough(watched):
    assert not watched.after(1)
    watched.begins(1)
    assert not watched.after(1000)
    watched.is_measured(1)
    assert watched.after(0.1)


def test_figures_without_steps_are_not_enough(watched):
    watched.begins(1)
    watched.is_measured(1, steps=0)
    assert not watched.after(1000)


def test_a_process_that_cannot_be_measured_is_not_waited_for(watched):
    watched.begins(1)
    (watched.folder / f"{FAILED}1").write_text("RuntimeError: no")
    assert watched.after(0.1)


def test_all_ranks_of_a_host_are_waited_for(watched):
    watched.begins(1)
    watched.is_measured(1, participants=2, rank=0)
    assert not watched.after(1000)
    watched.begins(2)
    watched.is_measured(2, participants=2, rank=1)
    assert watched.after(0.1)


def test_others_that_make_steps_get_as_long_again(watched):
    watched.begins(1)
    watched.begins(2)
    assert not watched.after(1)
    watched.is_measured(2)
    assert not watched.after(10)
    assert not watched.after(9)
    watched.is_measured(1)
    assert watched.after(0.1)


def test_others_that_stopped_making_steps_are_not_waited_for_longer(watched):
    watched.begins(1)
    watched.begins(2)
    assert not watched.after(1)
    watched.is_measured(2)
    assert not watched.after(10)
    assert watched.after(11)


def test_others_that_have_ended_are_not_waited_for(watched):
    watched.begins(1)
    watched.begins(2)
    watched.is_measured(2)
    assert not watched.after(LEAST_WAIT_SECONDS / 2)
    watched.alive.remove(1)
    assert watched.after(0.01)


def ending_with(step, **changes):
    return replace(figures(**changes), step=step)


def test_a_training_counts_before_helpers_that_only_call_modules():
    found = diagnosis_of([ending_with("module", pid=1), ending_with("optimizer", pid=2)], {}, MACHINE, NO_CEILINGS)
    assert [each.figures.pid for each in found.processes] == [2]


def test_all_ranks_count():
    ranks = [ending_with("module", pid=1, rank=0), ending_with("optimizer", pid=2, rank=1)]
    found = diagnosis_of([*ranks, figures(pid=3)], {}, MACHINE, NO_CEILINGS)
    assert [each.figures.pid for each in found.processes] == [1, 2]


def test_processes_one_after_the_other_do_not_take_cpus_from_one_another():
    first, second = figures(pid=1, started=0.0, ended=10.0), figures(pid=2, started=11.0, ended=20.0)
    assert diagnosis_of([first, second], {}, MACHINE, NO_CEILINGS).first is None
    together = figures(pid=2, started=9.0, ended=20.0)
    assert diagnosis_of([first, together], {}, MACHINE, NO_CEILINGS).first.kind == "oversubscribed"


ABSENCES = {
    "loaded torch": ((), Ending()),
    "no call of a module": ((), Ending(states=frozenset({LOADED}))),
    "other threads": ((), Ending(states=frozenset({LOADED, IN_THREADS}))),
    "ended before enough": ((), Ending(states=frozenset({LOADED, IN_THREADS, STEPPING}))),
    "too few steps: 6 were seen, and 8 are needed": ((figures(steps=0, seen_steps=6),), Ending()),
}


@pytest.mark.parametrize("words", ABSENCES)
def test_why_nothing_was_measured(words):
    given, ending = ABSENCES[words]
    found = diagnosis_of(given, {}, MACHINE, NO_CEILINGS, ending=ending)
    assert found.processes == ()
    assert words in found.absence


def test_why_a_process_could_not_be_measured_is_said():
    ending = Ending(states=frozenset({LOADED}), unmeasured="RuntimeError: no")
    assert "RuntimeError: no" in diagnosis_of([], {}, MACHINE, NO_CEILINGS, ending=ending).absence
    (remark,) = diagnosis_of([figures()], {}, MACHINE, NO_CEILINGS, ending=ending).remarks
    assert remark == "another process could not be measured: RuntimeError: no"


def test_a_failure_after_the_steps_is_said():
    found = diagnosis_of([figures()], {}, MACHINE, NO_CEILINGS, ending=Ending(failure="it exited with code 1"))
    assert found.remarks == ("the program did not end well after these steps: it exited with code 1",)


def test_a_program_that_removes_the_folder_ends_its_diagnosis_with_a_sentence(tmp_path):
    watched = Watched(tmp_path)
    assert not watched.measurement.is_complete()
    tmp_path.rmdir()
    for read in (watched.measurement.is_complete, *(partial(each, str(tmp_path)) for each in READERS)):
        with pytest.raises(LaunchError, match="cannot read what the program's processes wrote"):
            read()
