"""What is read of a run's directory that another user renames or exchanges, as in one that everyone may write."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpulaunch.launch.monitor.worker_report import read_event_file
from cpulaunch.launch.process.run_directory import (
    events_path,
    make_event_files,
    make_events_directory,
    make_private_path,
    remove_run_directory,
)
from cpulaunch.launch.ranks.files import ERROR_FILE, RunFolder, make_rank_files
from cpulaunch.launch.supervision.error_file import read_error
from cpulaunch.measure.diagnosis.folder import FiguresReader, failed_processes, read_failure, read_trace
from cpulaunch.measure.execution import _read_report
from cpulaunch.records.torch_settings import FAILED, FIGURES, TRACES, figures_name
from cpulaunch.system.files.folders import open_own
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


def test_the_report_of_a_measured_launch_is_read(run: Path) -> None:
    path = run / "report.json"
    path.write_text(json.dumps({"metrics": {}}))
    exchange(run)
    path.write_text(json.dumps({"metrics": "forged"}))
    assert _read_report(str(path)) == {"metrics": {}}


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
