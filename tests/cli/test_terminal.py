"""Messages on stderr: one prefix, and colours on a terminal only."""

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpulaunch.cli import terminal
from cpulaunch.cli.measuring.progress import ProgressLine


def printed_to_terminal(text, environ, monkeypatch):
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        terminal.notify(text, environ)
        return os.read(reader, 1000).decode().rstrip("\r\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("error: no such file", "cpulaunch: \x1b[1;31merror:\x1b[0m no such file"),
        ("warning: slow", "cpulaunch: \x1b[33mwarning:\x1b[0m slow"),
        ("report: error: r.json", "cpulaunch: report: error: r.json"),
    ],
)
def test_a_leading_error_or_warning_is_coloured_on_a_terminal(text, expected, monkeypatch):
    assert printed_to_terminal(text, {}, monkeypatch) == expected


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_the_user_can_switch_colours_off(environ, monkeypatch):
    assert printed_to_terminal("error: no", environ, monkeypatch) == "cpulaunch: error: no"


def test_json_has_null_for_what_is_no_number(capfd):
    """Python would write NaN and Infinity, which other programs cannot read."""
    terminal.print_json({"a": [1.5, float("inf")], "b": {"c": float("nan")}, "d": float("-inf")})
    found = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": [1.5, None], "b": {"c": None}, "d": None}


def test_a_pipe_gets_no_colours(capfd):
    terminal.notify("error: no such file", {})
    assert capfd.readouterr().err == "cpulaunch: error: no such file\n"


def test_escape_sequences_in_a_message_are_shown_as_text(capfd):
    terminal.notify("error: no \x1b]0;owned\x07: /\udcff\nhint: \x9b", {})
    assert capfd.readouterr().err == "cpulaunch: error: no \\x1b]0;owned\\x07: /\\udcff\nhint: \\x9b\n"


@pytest.fixture
def unread():
    """The write end of a full pipe that is not read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, bytes(1 << 20))
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)


def test_a_message_that_is_not_read_is_dropped_in_time(unread, monkeypatch):
    with os.fdopen(unread, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        start = time.monotonic()
        terminal.notify("warning: late", {}, seconds=0.1)
        terminal.notify_json({"text": "late"}, seconds=0.1)
        assert 0.2 <= time.monotonic() - start < 10


def fill(terminal_fd):
    """Effect: the terminal has no room; what it has is in other buffers of the kernel a moment later."""
    fd = os.open(os.ttyname(terminal_fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    for _ in range(20):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, b"x")
        select.select([], [], [], 0.01)
    os.close(fd)


def test_a_message_for_which_a_terminal_has_too_little_room_is_dropped_in_time(monkeypatch):
    reader, writer = pty.openpty()
    fill(writer)
    while not select.select([], [writer], [], 0.1)[1]:
        os.read(reader, 64)
    with os.fdopen(writer, "w") as stderr, ThreadPoolExecutor() as threads:
        monkeypatch.setattr("sys.stderr", stderr)
        written = threads.submit(terminal.notify, "y" * 4000, {}, seconds=0.1)
        try:
            written.result(timeout=30)
        finally:
            os.close(reader)


def test_a_message_is_dropped_in_time_of_which_a_terminal_with_room_takes_nothing(monkeypatch):
    """Its room may be one character, where the end of a line takes two. Source: Linux, n_tty.c, do_output_char."""
    reader, writer = pty.openpty()
    latest = time.monotonic() + 10

    def refuse(fd, data):
        assert time.monotonic() < latest
        raise BlockingIOError

    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", refuse)
            terminal.notify("text", {}, seconds=0.1)
    os.close(reader)


def test_a_stopped_terminal_gets_no_progress(monkeypatch):
    """By Ctrl-S, or by a program: a measurement would wait, whatever its time limit."""
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stderr, ThreadPoolExecutor() as threads:
        monkeypatch.setattr("sys.stderr", stderr)
        line = ProgressLine({"TERM": "xterm"}, width=80)
        line.show("one")
        termios.tcflow(writer, termios.TCOOFF)
        shown = threads.submit(line.show, "two")
        try:
            shown.result(timeout=30)
        finally:
            termios.tcflow(writer, termios.TCOON)
        line.show("three")
        text = b""
        while b"three" not in text:
            text += os.read(reader, 1000)
    assert b"one" in text
    assert b"two" not in text
    os.close(reader)


def test_a_long_message_arrives_in_parts(monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stderr, ThreadPoolExecutor() as threads:
        monkeypatch.setattr("sys.stderr", stderr)
        read = threads.submit(os.fdopen(reader).read)
        terminal.notify("x" * 1_000_000, {}, seconds=60)
        stderr.close()
        assert read.result() == f"cpulaunch: {'x' * 1_000_000}\n"


def test_a_launch_can_print_although_no_descriptor_is_left():
    code = (
        "import os, resource; from cpulaunch.cli.run import notifier; notify = notifier(os.environ, json=False); "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); notify('warning: full')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stderr == "cpulaunch: warning: full\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_all_is_written_to_a_pipe_that_another_process_has_made_non_blocking(stream, monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    write = {"stdout": terminal.print_text, "stderr": terminal.write_stderr}[stream]
    with os.fdopen(writer, "w") as output, ThreadPoolExecutor() as threads:
        monkeypatch.setattr(f"sys.{stream}", output)
        written = threads.submit(write, "x" * 1_000_000)
        select.select([], [], [], 0.1)  # Until the pipe is full: its reader is slower.
        read = threads.submit(os.fdopen(reader).read)
        written.result()
        output.close()
        assert read.result() == f"{'x' * 1_000_000}\n"


def test_a_stream_without_a_descriptor_gets_the_output():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        terminal.print_text("\u00fcber")
        terminal.notify("error: no", {})
    assert (out.getvalue(), err.getvalue()) == ("\u00fcber\n", "cpulaunch: error: no\n")


def test_output_needs_no_poll(monkeypatch):
    """Windows lacks it."""
    monkeypatch.delattr(select, "poll")
    written = io.BytesIO()
    with io.TextIOWrapper(written, "ascii", newline="\r\n") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        terminal.print_text("\u00fcber")
        terminal.notify("error: \u00fcber", {}, seconds=1)
        assert written.getvalue() == b"?ber\r\ncpulaunch: error: \\xfcber\r\n"
