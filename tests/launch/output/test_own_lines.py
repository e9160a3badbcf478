"""Messages of the launcher stand between lines of the workers, where both go to the same place."""

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from json import loads

import pytest

from cpulaunch.cli import terminal
from cpulaunch.cli.report import _on_new_line
from cpulaunch.cli.run import notifier, run
from cpulaunch.cli.terminal import DURING_SECONDS
from cpulaunch.launch.output.routing import LINE_SECONDS, OutputRouting
from cpulaunch.launch.output.sink import ERASE_LINE, Sink
from cpulaunch.launch.output.streams import LINE_BYTES, OutputRoute
from cpulaunch.launch.process.watchdog import ANSWER_SECONDS
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from tests.launch.launching import HERE, Launcher, eventually, python
from tests.launch.process.killing import ROOT, chain
from tests.launch.process.test_killed_launchers import PATIENT

SAID = b"said\n"


def saying(sink, fd, *, failed=pytest.fail):
    """A function that writes a message into the descriptor, between the lines that the sink writes."""
    routing = OutputRouting(sinks=(sink,), stdio=(), streams=(), logs=(), metrics=(), stdin=(), stderr=sink)

    def notify(text):
        select.select([], [fd], [])
        os.write(fd, text.encode())

    return routing.between_lines(notify, failed)


LONG = b"x" * LINE_BYTES
FEEDS = {
    "nothing": (b"", [], [b"a\n"], SAID + b"a\n"),
    "whole lines": (b"", [b"a\n"], [b"b\n"], b"a\n" + SAID + b"b\n"),
    "a part of a line": (b"", [b"a"], [b"b\n"], b"a\n" + SAID + b"b\n"),
    "a part of a line that is held back": (b"[0] ", [b"a\nb"], [b"c\n"], b"[0] a\n" + SAID + b"[0] bc\n"),
    "a part of a long line": (b"[0] ", [LONG], [b"y\n"], b"[0] " + LONG + b"\n" + SAID + b"[0] y\n"),
    "a line end in part": (b"", [b"a\r"], [b"\n"], b"a\r\n" + SAID + b"\n"),
    "a progress bar": (b"[0] ", [b"1%\r2"], [b"%\n"], b"[0] 1%\r" + ERASE_LINE + SAID + b"[0] 2%\n"),
}


@pytest.mark.parametrize(("prefix", "before", "after", "expected"), FEEDS.values(), ids=FEEDS.keys())
def test_a_message_stands_on_a_line_of_its_own(tmp_path, prefix, before, after, expected):
    path = tmp_path / "out"
    sink = Sink(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), name="file")
    sink.redraw_separator = ERASE_LINE
    route = OutputRoute(sink, prefix=prefix, exclusive=not prefix)
    say = saying(sink, sink.fd)
    for data in before:
        route.feed(data)
    say(SAID.decode())
    for data in after:
        route.feed(data)
    sink.close()
    assert path.read_bytes() == expected


@pytest.fixture
def full():
    """A sink whose pipe is full, in the middle of a line."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    sink = Sink(write, name="pipe")
    for _ in range(20):
        sink.send(b"x" * 99_999 + b"\n")
    yield sink, read
    os.close(read)


def test_a_message_waits_for_the_end_of_one_line(full, monkeypatch):
    monkeypatch.setattr("cpulaunch.launch.output.routing.LINE_SECONDS", 60)
    sink, read = full
    found = []

    def receive():
        while data := os.read(read, 1 << 16):
            found.append(data)

    receiver, say = threading.Thread(target=receive), saying(sink, sink.fd)
    receiver.start()
    say(SAID.decode())
    waiting = sink.has_pending
    os.set_blocking(sink.fd, True)
    sink.flush()
    sink.close()
    receiver.join()
    lines = b"".join(found).split(b"\n")
    assert lines.count(SAID.strip()) == 1
    assert {len(line) for line in lines} == {0, 4, 99_999}
    assert waiting


def said_behind(sink, *, times=1, written=True):
    """The messages as they are printed into the descriptor behind what the sink has written, or would be."""
    said = []
    routing = OutputRouting(sinks=(sink,), stdio=(), streams=(), logs=(), metrics=(), stdin=(), stderr=sink)
    say = routing.between_lines(lambda text: said.append(text) or written, pytest.fail)
    assert [say(SAID.decode()) for _ in range(times)] == [written] * times
    return "".join(said).encode()


def test_a_message_breaks_a_line_that_the_reader_does_not_take_in_time(full):
    sink, _ = full
    assert said_behind(sink) == b"\n" + SAID
    sink.close()


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_line_is_broken_once(full, abandoned):
    sink, read = full
    if abandoned:
        sink.abandon()
    assert said_behind(sink, times=2, written=False) == 2 * (b"\n" + SAID)
    assert said_behind(sink, times=2) == b"\n" + 2 * SAID
    os.read(read, 1 << 16)
    sink.flush()
    assert said_behind(sink) == (SAID if abandoned else b"\n" + SAID)
    sink.close()


@pytest.mark.skipif(not hasattr(fcntl, "F_GETPIPE_SZ"), reason="Linux only")
def test_a_line_that_a_message_breaks_is_not_broken_again():
    """Of the line that has been written, nothing waits but the newline that was to break it."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    sink = Sink(write, name="pipe")
    sink.send(b"x" * fcntl.fcntl(write, fcntl.F_GETPIPE_SZ))
    assert not sink.has_pending
    assert said_behind(sink, written=False) == b"\n" + SAID
    assert sink.has_pending
    assert said_behind(sink) == b"\n" + SAID
    assert not sink.has_pending
    sink.close()
    os.close(read)


def test_a_message_breaks_a_line_whose_rest_was_abandoned(full, monkeypatch):
    """Without waiting: nothing more of it is written."""
    monkeypatch.setattr("cpulaunch.launch.output.routing.LINE_SECONDS", 3600)
    sink, _ = full
    sink.abandon()
    assert sink.is_inside_line
    assert said_behind(sink) == b"\n" + SAID
    sink.close()


def test_a_message_breaks_no_line_if_the_reader_is_gone(full):
    sink, read = full
    other = os.dup(read)  # The fixture closes the descriptor.
    os.dup2(os.open(os.devnull, os.O_RDONLY), read)
    os.close(other)
    sink.flush()
    assert sink.reader_gone
    assert said_behind(sink) == SAID
    sink.close()


def test_a_message_holds_the_supervisor_for_less_than_the_guard_waits():
    """While it waits for the end of a line and then for room, no signal is read: half a second at most."""
    assert LINE_SECONDS + DURING_SECONDS <= 0.5 < ANSWER_SECONDS


@pytest.mark.parametrize("json", [False, True])
def test_a_leading_newline_of_a_message_precedes_all_that_is_printed(json, capfd):
    show = notifier({}, json=json, seconds=60)
    assert show("\nwarning: one")
    assert show("two")
    before, first, second, after = capfd.readouterr().err.split("\n")
    assert (before, after) == ("", "")
    if json:
        assert [loads(line)["message"] for line in (first, second)] == ["one", "two"]
    else:
        assert [first, second] == ["cpulaunch: warning: one", "cpulaunch: two"]


@pytest.mark.parametrize("json", [False, True])
def test_a_message_that_is_not_taken_in_time_is_known_to_be_lost(json, full, monkeypatch):
    sink, _ = full
    with os.fdopen(sink.fd, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        assert not notifier({}, json=json, seconds=0)("one")
        monkeypatch.undo()


def test_notes_break_a_line_once_the_first_of_them_is_written():
    shown = []
    show = _on_new_line(lambda text: shown.append(text) or len(shown) > 1)
    assert [show(text) for text in ("one", "two", "three")] == [False, True, True]
    assert shown == ["\none", "\ntwo", "three"]


HALF = """
import sys, time
print("half a line", end="", file=sys.stderr, flush=True)
open("ready", "w").close()
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")
@pytest.mark.parametrize(
    ("target", "first"), [("supervisor", ""), ("inner", "cpulaunch: stopped by SIGKILL (signal 9: killed)\n")]
)
@pytest.mark.parametrize(("options", "before"), [((), "half a line\n"), (("--show", "none"), "")])
def test_a_guard_breaks_a_line_before_it_says_that_the_launch_was_killed(tmp_path, target, first, options, before):
    """If its supervisor could not, and shows the output of a worker."""
    (tmp_path / "half.py").write_text(HALF)
    patient = [sys.executable, "-c", PATIENT, target, "100", "--instances", "1", "--log-dir", "logs", *options]
    environ, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    with subprocess.Popen([*patient, "half.py"], cwd=tmp_path, env=environ, stderr=pipe, text=True) as process:
        said = process.stderr.read(len(before) - 1) if before else ""
        eventually((tmp_path / "ready").exists, "the worker")
        os.kill(chain(process.pid)[target], signal.SIGKILL)
        said += process.stderr.read()
    text = "cpulaunch: a process of the launcher was killed by signal 9; all workers were ended\n"
    assert said == before + first + text


@pytest.mark.parametrize("inside_line", [False, True])
def test_the_summary_breaks_a_line_that_the_workers_left(inside_line, tmp_path, monkeypatch, capfd):
    worker = WorkerResult(index=0, pid=1, exit_code=3, signal=None, last_lines=(), log=None)
    failed = LaunchResult(exit_code=3, host="h", workers=(worker,), first_failure=0, inside_line=inside_line)
    monkeypatch.setattr("cpulaunch.cli.run.launch", lambda plan, **options: failed)
    words = ["--report", str(tmp_path / "r.json"), "--", sys.executable, "-c", ""]
    assert run(words, {"PATH": os.defpath}, only_plan=False) == 3
    written = capfd.readouterr().err
    assert written.removeprefix("\n" * inside_line).startswith("cpulaunch: worker 0")
    assert "\n\n" not in written


def refusing_first(write):
    """The same function, which writes nothing the first time."""
    refused = []

    def write_later(text, **options):
        if refused:
            return write(text, **options)
        refused.append(text)
        return False

    return write_later


def test_a_note_breaks_a_line_if_the_summary_could_not_be_written(tmp_path, monkeypatch, capfd):
    failed = LaunchResult(exit_code=3, host="h", workers=(), inside_line=True)
    monkeypatch.setattr("cpulaunch.cli.run.launch", lambda plan, **options: failed)
    monkeypatch.setattr("cpulaunch.launch.supervision.failure_text.summary", lambda result: ())
    monkeypatch.setattr("cpulaunch.cli.terminal.write_stderr", refusing_first(terminal.write_stderr))
    words = ["--report", str(tmp_path / "r.json"), "--", sys.executable, "-c", ""]
    assert run(words, {"PATH": os.defpath}, only_plan=False) == 3
    assert capfd.readouterr().err == f"\ncpulaunch: report: {tmp_path}/r.json\n"


def test_a_line_that_cannot_be_ended_is_a_failure_of_the_output(tmp_path):
    sink = Sink(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT), name="file")
    sink.send(b"a")
    os.dup2(os.open("/dev/full", os.O_WRONLY), sink.fd)
    failures = []
    with open(tmp_path / "said", "wb") as said:
        saying(sink, said.fileno(), failed=failures.append)(SAID.decode())
    sink.close()
    assert [error.filename for error in failures] == ["file"]
    assert (tmp_path / "said").read_bytes() == SAID


@pytest.mark.parametrize("code", [3, 0])
def test_what_follows_the_last_line_of_a_worker_begins_a_new_one(tmp_path, code):
    launcher = Launcher(tmp_path)
    worker = python(f"import sys; sys.stderr.write('no newline'); sys.exit({code})")
    done = launcher.run(worker, log_dir="logs", popen={"stderr": subprocess.STDOUT})
    assert done.code == code
    first, *others = done.out.split(b"\n")
    assert first == b"no newline"
    assert others == [] if code == 0 else others[0].startswith(b"cpulaunch: worker 0")


@pytest.mark.parametrize(("options", "note"), [([], b"cpulaunch: report: r.json\n"), (["-q"], b"")])
def test_a_note_after_a_success_begins_a_new_line(tmp_path, options, note):
    program = "import sys; sys.stderr.write('no newline')"
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, "-m", "cpulaunch", "--report", "r.json", *options, "program.py"]
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, timeout=240, check=True)
    _, said, rest = done.stderr.partition(b"no newline")
    assert said
    assert rest[:1] == b"\n" * bool(note)
    assert rest.endswith(note)
