"""A worker adds events to the launch's file alone, whatever is there now, and never waits."""

import errno
import os

import pytest

from cpulaunch.launch.monitor.watch import Observation
from cpulaunch.launch.monitor.worker_report import WorkerReport, read_event_file
from cpulaunch.launch.supervision.report import lost_events, workers_without_plugin
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.records.torch_settings import EVENTS_VARIABLE
from cpulaunch.system.files.writing import create
from cpulaunch.worker.reporting.events import report_event


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("victim", path)])
def test_what_replaced_the_event_file_is_not_written(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").touch()
    make("events")
    monkeypatch.setenv(EVENTS_VARIABLE, str(tmp_path / "events"))
    report_event("live", x=1)
    assert (tmp_path / "victim").read_bytes() == b""


def test_events_are_added_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "events").touch()
    monkeypatch.setenv(EVENTS_VARIABLE, str(tmp_path / "events"))
    report_event("live", x=1)
    report_event("live", x=2)
    assert (tmp_path / "events").read_text().count("\n") == 2


@pytest.mark.parametrize("whole", [False, True])
def test_the_launch_sees_that_an_event_found_no_space(tmp_path, monkeypatch, whole):
    """Else a worker that could report nothing would count as one without torch: an error with --strict."""
    events = tmp_path / "events"
    os.close(create(str(events)))
    monkeypatch.setenv(EVENTS_VARIABLE, str(events))
    report_event("metric", name="speed", value=1)
    assert not read_event_file(str(events)).lost
    write = os.write

    def full(fd, data):
        if not whole:
            return write(fd, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    report_event("live", x=1)
    report = read_event_file(str(events))
    assert (report.lost, report.metrics) == (True, {"speed": 1})
    workers = tuple(
        WorkerResult(index=index, pid=1, exit_code=0, signal=None, observation=Observation(wall_seconds=1, report=each))
        for index, each in enumerate((report, WorkerReport()))
    )
    result = LaunchResult(exit_code=0, host="here", workers=workers)
    assert workers_without_plugin(result) == (1,)
    (line,) = lost_events(result)
    assert line.startswith("warning: worker 0 could not write all events")


def test_events_are_lost_without_an_error_where_the_file_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv(EVENTS_VARIABLE, str(tmp_path / "events"))
    report_event("live", x=1)
    assert list(tmp_path.iterdir()) == []
