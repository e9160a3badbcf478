"""When the processes of a program have been measured, and which of them a diagnosis is about."""

import json
from functools import partial

import pytest

from cpulaunch.measure.diagnosis import folder as folders
from cpulaunch.measure.diagnosis.diagnosis import Ending, diagnosis_of
from cpulaunch.measure.diagnosis.folder import (
    MAX_FILES,
    FiguresReader,
    failed_processes,
    read_failure,
    read_states,
    stepping_processes,
)
from cpulaunch.measure.diagnosis.progress import LEAST_WAIT_SECONDS, Measurement
from cpulaunch.measure.diagnosis.rates import NO_CEILINGS
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import replace
from cpulaunch.records.torch_settings import FAILED, FETCHES, FIGURES, IN_THREADS, LOADED, STEPPING, figures_name
from tests.measure.diagnosis.given import data, figures
from tests.measure.diagnosis.test_bottlenecks import MACHINE


def read_figures(folder):
    return FiguresReader(folder).read()


READERS = (read_figures, read_states, read_failure, stepping_processes, failed_processes)


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

    def is_measured(self, pid, worker=0, **changes):
        path = self.folder / figures_name(FIGURES, worker, pid)
        path.write_text(json.dumps(data(pid=pid, index=worker, **changes)))

    def after(self, seconds):
        self.now += seconds
        return self.measurement.is_complete()


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_looking_takes_a_small_share_of_the_time_whatever_asks(watched, monkeypatch):
    """A program that prints asks after each line, and there may be a thousand files."""
    looks = []

    def slow_read(self):
        looks.append(watched.now)
        watched.now += 0.024
        return ()

    monkeypatch.setattr(FiguresReader, "read", slow_read)
    while watched.now < 10:
        assert not watched.after(0.001)
    assert 10 < len(looks) < 25


def test_a_slow_look_does_not_put_the_next_one_off_for_long(watched, monkeypatch):
    looks = []

    def slow_read(self):
        looks.append(watched.now)
        watched.now += 30
        return ()

    monkeypatch.setattr(FiguresReader, "read", slow_read)
    assert not watched.after(0)
    assert not watched.after(LEAST_WAIT_SECONDS)
    assert len(looks) == 2


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


@pytest.mark.parametrize(("start", "processes"), [(STEPPING, stepping_processes), (FAILED, failed_processes)])
def test_only_names_with_a_process_id_count_and_not_all_of_a_flood(tmp_path, start, processes):
    for number in ("1", "4194304", "0", "x", "1x", "-1", "10000000", "1" * 200, str(2**61 - 1)):
        (tmp_path / f"{start}{number}").touch()
    assert processes(str(tmp_path)) == {1, 4194304}
    for number in range(1, MAX_FILES + 2):
        (tmp_path / f"{start}{number}").touch()
    assert processes(str(tmp_path)) == set(range(1, MAX_FILES + 1))


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


@pytest.fixture
def read_texts(monkeypatch):
    """The texts that were read as figures so far."""
    texts, read = [], folders.read_figures
    monkeypatch.setattr(folders, "read_figures", lambda text: (texts.append(text), read(text))[1])
    return texts


def test_figures_are_read_once_however_many_come_later(watched, read_texts):
    for pid in range(1, 31):
        watched.is_measured(pid, participants=100)
        assert not watched.after(1)
    assert len(read_texts) == 30


def test_figures_that_were_replaced_or_changed_are_read_again(watched, read_texts):
    reader = FiguresReader(str(watched.folder))
    watched.is_measured(1, steps=10)
    watched.is_measured(2)
    assert [each.steps for each in reader.read()] == [10, 10]
    watched.is_measured(1, steps=11_000)
    assert [each.steps for each in reader.read()] == [11_000, 10]
    watched.is_measured(3, steps=12_000)
    (watched.folder / figures_name(FIGURES, 0, 3)).rename(watched.folder / figures_name(FIGURES, 0, 1))
    assert [each.steps for each in reader.read()] == [12_000, 10]
    assert len(read_texts) == 4


def test_a_workers_flood_of_files_takes_nothing_from_another_worker(watched, monkeypatch):
    monkeypatch.setattr(folders, "MAX_FILES", 10)
    for pid in range(1, 31):
        watched.is_measured(pid)
        (watched.folder / figures_name(FETCHES, 0, pid)).write_text('{"seconds": 1.0}')
    watched.is_measured(40, worker=1, loader_workers=2)
    for pid in (41, 42):
        (watched.folder / figures_name(FETCHES, 1, pid)).write_text('{"seconds": 2.0}')
    reader = FiguresReader(str(watched.folder))
    figures = reader.read()
    assert [each.pid for each in figures] == [1, 40, 2, 3, 4, 5, 6, 7]
    assert figures[1].fetches["seconds"] == 4.0
    assert reader.ignored == 63 - 10


def test_large_files_of_a_worker_take_nothing_from_another_worker(watched, monkeypatch):
    size = len(json.dumps(data()))
    monkeypatch.setattr(folders, "MAX_BYTES", 40 * size)
    monkeypatch.setattr(folders, "MAX_FILE_BYTES", 10 * size)
    for pid in range(1, 31):
        (watched.folder / figures_name(FIGURES, 0, pid)).write_text("x" * 10 * size)
    watched.is_measured(40, worker=1)
    reader = FiguresReader(str(watched.folder))
    assert [each.pid for each in reader.read()] == [40]
    assert reader.ignored == 30


def test_a_file_that_is_being_written_is_no_figures(watched):
    watched.is_measured(1)
    (watched.folder / f"{figures_name(FIGURES, 0, 1)}.0123456789abcdef").write_text(json.dumps(data(pid=1)))
    reader = FiguresReader(str(watched.folder))
    assert ([each.pid for each in reader.read()], reader.ignored) == ([1], 0)


def test_files_that_were_left_out_are_counted_and_said(watched):
    watched.is_measured(1)
    for pid in (2, 3):
        (watched.folder / figures_name(FIGURES, 0, pid)).write_text("{")
    reader = FiguresReader(str(watched.folder))
    found = diagnosis_of(reader.read(), {}, MACHINE, NO_CEILINGS, ending=Ending(ignored=reader.ignored))
    assert found.remarks == ("2 files of figures were left out: malformed, or more than is read of a launch",)


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
