"""What is read of a run's directory that another user renames or exchanges, as in one that everyone may write."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.launch.monitor.worker_report import read_event_file
from cpulaunch.launch.process.run_directory import (
    events_path,
    make_event_files,
    make_events_directory,
    make_private_path,
    remove_run_directory,
)
from cpulaunch.launch.ranks import engine
from cpulaunch.launch.ranks.files import ERROR_FILE, RunFolder, make_rank_files
from cpulaunch.launch.supervision.error_file import read_error
from cpulaunch.measure.diagnosis.folder import FiguresReader, failed_processes, read_failure, read_trace
from cpulaunch.measure.execution import _read_report
from cpulaunch.records.torch_settings import FAILED, FIGURES, TRACES, figures_name
from cpulaunch.system.files import folders
from cpulaunch.system.files.folders import open_own
from cpulaunch.system.libc import is_linux
from tests.measure.diagnosis.given import data

EVENT = json.dumps({"event": "metric", "pid": 1, "name": "loss", "value": 2}) + "\n"
ERROR = json.dumps({"message": "no memory"})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run, which this process has made."""
    make_private_path(str(tmp_path / "run"))
    yield tmp_path / "run"
    remove_run_directory(str(tmp_path / "run"))


def exchange(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir()


@pytest.mark.parametrize("of_ranks", [False, True])
def test_the_events_of_workers_are_read(run: Path, of_ranks: bool) -> None:
    folder = str(run)
    if of_ranks:
        folder = make_events_directory(folder, [0])
    else:
        make_event_files(folder, [0])
    path = events_path(folder, 0)
    Path(path).write_text(EVENT)
    os.chmod(path, 0o601)  # The mark that an event was lost.
    exchange(run)
    report = read_event_file(path)
    assert (report.metrics, report.lost) == ({"loss": 2}, True)


@pytest.mark.parametrize("of_ranks", [False, True])
def test_the_files_for_events_are_made_in_the_directory_of_the_run(run: Path, of_ranks: bool) -> None:
    exchange(run)
    if of_ranks:
        make_events_directory(str(run), [0])
    else:
        make_event_files(str(run), [0])
    assert list(run.iterdir()) == []
    assert [path.name for path in run.with_name("moved").rglob("*.jsonl")] == ["worker-0.jsonl"]


@pytest.mark.parametrize("spare", [False, True], ids=["", "where the first one is full"])
def test_the_folder_of_ranks_is_the_one_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    def make(path: str) -> int:
        fd = make_private_path(path)
        exchange(Path(path))
        return fd

    monkeypatch.setattr(engine, "choose_private_path", lambda environ: str(tmp_path / "run"))
    monkeypatch.setattr(engine, "make_private_path", make)
    folder = RunFolder(path=str(tmp_path / "run"), kept=False, private=True)
    job = engine._RankRun(
        plan=Any,
        job=Any,
        specs=(),
        run_id="",
        folder=folder,
        private=folder.path,
        environ={},
        error_file="",
        memory_events=None,
        notify=print,
        on_started=None,
    )
    made = engine._with_spare(job, []) if spare else engine._with_directories(job)
    make_rank_files(made.folder, restarts=0, ranks=1).close()
    assert [path.name for path in tmp_path.glob("*/attempt_0")] == ["attempt_0"]
    assert (tmp_path / "moved/attempt_0/0").is_dir()
    remove_run_directory(str(tmp_path / "run"))


@pytest.mark.skipif(not is_linux(), reason="other systems do not tell an opened folder's name")
@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_that_a_worker_has_renamed_is_removed(run: Path, replaced: bool) -> None:
    (run / "deep/deeper").mkdir(parents=True)
    exchange(run)
    if not replaced:
        run.rmdir()
    remove_run_directory(str(run))
    assert list(run.parent.iterdir()) == []


def test_what_cannot_be_removed_in_time_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process goes on making folders there, each try takes some seconds."""
    tries = []
    make_private_path(str(tmp_path / "run"))
    monkeypatch.setattr(folders, "empty_folder", tries.append)
    (tmp_path / "run/kept").mkdir()
    remove_run_directory(str(tmp_path / "run"))
    assert len(tries) == 1


def test_a_directory_that_a_worker_has_moved_elsewhere_stays(run: Path) -> None:
    """And so does what has its name in the folder where it was."""
    for folder in ("elsewhere", "moved"):
        run.with_name(folder).mkdir()
    run.rename(run.with_name("elsewhere") / "moved")
    remove_run_directory(str(run))
    assert sorted(path.name for path in run.parent.rglob("*")) == ["elsewhere", "moved", "moved"]


def test_no_report_of_a_measured_launch_is_read_that_may_be_forged(run: Path) -> None:
    """The launch finds its directory by the path: what is in the other one need not be of its making."""
    path, report = run / "report.json", json.dumps({"metrics": {}, "plan": {"mode": "single"}, "workers": []})
    path.write_text(report)
    assert _read_report(str(path)) == json.loads(report)
    exchange(run)
    assert _read_report(str(path)) is None
    path.write_text(report)
    assert _read_report(str(path)) is None


def test_what_the_processes_of_a_diagnosis_write_is_read(run: Path) -> None:
    def write(steps: int, text: str) -> None:
        (run / figures_name(FIGURES, 0, 7)).write_text(json.dumps(data(steps=steps)))
        (run / f"{FAILED}8").write_text(text)
        (run / f"{TRACES}7.json").write_text(text)

    write(20, "true")
    reader = FiguresReader(str(run))
    reader.read()
    exchange(run)
    write(30, "forged")
    (run / f"{FAILED}9").touch()
    assert [each.steps for each in reader.read()] == [each.steps for each in FiguresReader(str(run)).read()] == [20]
    assert failed_processes(str(run)) == {8}
    assert read_failure(str(run)) == "true"
    assert read_trace(str(run), 7) == b"true"


@pytest.mark.parametrize("place", ["run", "logs", "logs that others can change"])
def test_the_exceptions_of_ranks_are_read(tmp_path: Path, run: Path, place: str) -> None:
    (tmp_path / "logs").mkdir()
    folder = run if place == "run" else tmp_path / "logs"
    secure = place != "logs that others can change"
    kept = RunFolder(path=str(folder), kept=True, fd=open_own(str(folder)), secure=secure)
    files = make_rank_files(kept, restarts=0, ranks=1, private=str(run))
    Path(files.error_file(0)).write_text(ERROR)
    exchange(folder if secure else run)
    found = read_error(*files.opened_error_file(0))
    assert found is not None
    assert found.text == "no memory"
    files.close()
    copied = tmp_path / "moved" if secure else folder
    assert json.loads((copied / "attempt_0/0" / ERROR_FILE).read_text()) == json.loads(ERROR)
    os.close(kept.fd or 0)
