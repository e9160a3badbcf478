"""A worker adds events to the launch's file alone, whatever is there now, and never waits."""

import os

import pytest

from cpulaunch.records.torch_settings import EVENTS_VARIABLE
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
