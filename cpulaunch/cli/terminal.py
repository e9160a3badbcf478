"""Printing to stdout and stderr: widths, colours, encodings and closed streams; and whether there is input."""

from __future__ import annotations

import io
import os
import select
import sys
import time

from cpulaunch.records.errors import CpulaunchError, escaped_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TextIO

NARROWEST, WIDEST = 20, 120
COLORS = {"error:": "\x1b[1;31m", "warning:": "\x1b[33m"}
RESET = "\x1b[0m"
NOTICE_SECONDS = 0.5
"""How long a process of a launch waits for the reader of stderr, before it drops a message rather than be held."""
DURING_SECONDS = 0.3
"""How long it does while workers run: it may have waited LINE_SECONDS for the end of a line before."""
PART_BYTES = 1 << 12
"""A pipe into which can be written takes so many bytes at once. Source: pipe(7), PIPE_BUF."""
PAUSE_SECONDS = 0.01
"""Between two writes to what poll(2) calls writable and takes nothing: no event would tell that it takes more."""


def width() -> int:
    """Columns of the terminal, at least 20 and at most 120; 80 if there is no terminal."""
    import shutil

    return max(NARROWEST, min(shutil.get_terminal_size((80, 24)).columns, WIDEST))


def height() -> int:
    """Lines of the terminal; 24 if there is no terminal."""
    import shutil

    return shutil.get_terminal_size((80, 24)).lines


def color(environ: Mapping[str, str]) -> bool:
    """Whether to colour stdout."""
    return _is_colored(sys.stdout, environ)


def _is_colored(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether to colour what is written to the stream. Source: no-color.org."""
    if stream is None or not stream.isatty():
        return False
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def print_text(text: str, *, end: str = "\n") -> None:
    """Write text to stdout, if it is open, with "?" for characters that its encoding lacks.

    Raises: CpulaunchError if stdout cannot be written (disk full); BrokenPipeError if its reader is gone.
    """
    stdout = sys.stdout
    if stdout is None:
        return
    text += end
    try:
        _write(stdout, text, _encoding_errors(text, stdout.encoding or "utf-8"))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CpulaunchError(
            "cannot write the output", value=error.strerror, source="stdout", hint="redirect it: > FILE"
        ) from None


def print_json(value: Any) -> None:
    """Write one JSON object to stdout and nothing else."""
    print_text(json_text(value))


def json_text(value: Any) -> str:
    """JSON for other programs, in lines; what is no number (NaN, infinity), for which JSON has no word, is null."""
    import json

    try:
        return json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=2)


def notify(text: str, environ: Mapping[str, str], *, seconds: float | None = None) -> bool:
    """Whether `cpulaunch: text` was written to stderr, within so many seconds, as `write_stderr` does it.

    A leading `error:` or `warning:` has a colour there. Other escape sequences, such as those of a path or of a
    worker's message, are shown as text. A leading newline ends the line of another process before.
    """
    lead, text = text[: text.startswith("\n")], escaped_lines(text.removeprefix("\n"))
    word, space, rest = text.partition(" ")
    if word in COLORS and _is_colored(sys.stderr, environ):
        text = f"{COLORS[word]}{word}{RESET}{space}{rest}"
    return write_stderr(f"{lead}cpulaunch: {text}", seconds=seconds)


def notify_json(message: Mapping[str, Any], *, lead: str = "", seconds: float | None = None) -> bool:
    """Whether a message was written to stderr as one line of JSON, after the lead."""
    import json

    return write_stderr(lead + json.dumps(message), seconds=seconds)


def write_stderr(text: str, *, seconds: float | None = None) -> bool:
    """Whether the text was written to stderr. If it cannot be, the exit code still has to be returned.

    What its reader does not take within so many seconds (None: for ever) is dropped: a stopped reader takes nothing.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        return _write(sys.stderr, f"{text}\n", "backslashreplace", deadline)
    except OSError:
        return False


def _write(stream: TextIO, text: str, errors: str, deadline: float | None = None) -> bool:
    """Whether all was written. Effect: writes what can be written before the deadline (monotonic seconds), in parts.

    `errors`: the handler of characters that the stream's encoding lacks. A stream without a descriptor (StringIO) takes
    the text whole, and so does any on Windows, where consoles take no bytes and poll(2) is missing. Others are not
    written by print: a process that shares the descriptor may have made it non-blocking, and what cannot be written
    would stay in Python's buffer, and fail again later. Raises: OSError.
    """
    try:
        fd = stream.fileno() if hasattr(select, "poll") else None
    except io.UnsupportedOperation:
        fd = None
    if fd is None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
        print(text, end="", file=stream, flush=True)
        return True
    return _write_parts(fd, text.encode(stream.encoding, errors), deadline)


def _write_parts(fd: int, data: bytes, deadline: float | None) -> bool:
    """Whether all was written. Effect: writes what the descriptor takes before the deadline. Raises: OSError."""
    own = None
    if deadline is not None and os.isatty(fd):  # It can have room for less than a part, and would wait for more.
        from cpulaunch.system.files.special import open_nonblocking  # Few messages have a deadline.

        own = open_nonblocking(fd)
    left = memoryview(data)  # What is left is not copied.
    try:
        while left and _is_writable(fd, deadline):
            try:
                left = left[os.write(fd if own is None else own, left[:PART_BYTES]) :]
            except BlockingIOError:  # Also of a terminal that has room, but less than a line end takes.
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                time.sleep(PAUSE_SECONDS)
        return not left
    finally:
        if own is not None:
            os.close(own)


def _is_writable(fd: int, deadline: float | None) -> bool:
    """Whether a part can be written before the deadline; without one, waits until it can. Source: poll(2), POLLOUT."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())))


def _encoding_errors(text: str, encoding: str) -> str:
    """The error handler for this text: bytes of odd file names pass through, other unencodable text becomes "?"."""
    try:
        text.encode(encoding, "surrogateescape")
    except UnicodeEncodeError:
        return "replace"
    return "surrogateescape"


def has_input() -> bool:
    """Whether a pipe or file at standard input holds data that could be read."""
    import stat

    try:
        mode = os.fstat(0).st_mode
        if stat.S_ISREG(mode):
            return os.fstat(0).st_size > os.lseek(0, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(mode):
            return False
        import fcntl
        import termios

        return any(fcntl.ioctl(0, termios.FIONREAD, bytes(4)))
    except OSError:
        return False
