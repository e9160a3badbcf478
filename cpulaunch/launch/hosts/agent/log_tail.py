"""The ranks' logs as torch's agent shows them: it waits at the end of a job for what it reads here."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import time

from cpulaunch.launch.hosts.agent.files import logs_pipe
from cpulaunch.launch.process.descriptors import STDERR, STDOUT
from cpulaunch.system.files.reading import open_regular
from cpulaunch.system.files.writing import open_output_pipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from threading import Event
    from typing import Any, TextIO

MAX_TEXT = 1 << 16
"""Characters that are read at once: a write for each line would take longer than the ranks take to write it."""
MAX_LINE = 1 << 20
"""Characters of a line's rest, which are shown before the line ends."""
MAX_REST = 1 << 26
"""Bytes of a log that are shown after its rank has ended: a file without blocks may have any size."""

_locks: dict[tuple[int, int], threading.Lock] = {}
"""Of the pipes and files in which logs are shown, each by its device and number."""


class _Log(io.FileIO):
    """A log that a process may go on writing. `end`: the position at which it ends; None: where the file does."""

    end: int | None = None

    def readinto(self, buffer: Any) -> int | None:
        left = len(buffer) if self.end is None else max(0, self.end - self.tell())
        return super().readinto(memoryview(buffer)[:left])


def show_regular_logs(outputs: Mapping[TextIO, TextIO]) -> None:
    """Effect: torch's agent shows logs by `tail_log`, in those `outputs` instead of its own stdout and stderr.

    Source: torch 2.13, torch/distributed/elastic/multiprocessing/tail_log.py, TailLog.start.
    """
    from torch.distributed.elastic.multiprocessing import tail_log as torchs

    def tail(header: str, file: str, dst: TextIO, *rest: Any, **options: Any) -> None:
        tail_log(header, file, outputs.get(dst, dst), *rest, **options)

    torchs.tail_logfile = tail


def open_outputs(folder: int) -> dict[TextIO, TextIO]:
    """For stdout and stderr: a pipe in the opened folder, in which no message comes into the middle of a log's line.

    Raises: OSError.
    """
    out, err = sys.stdout, sys.stderr
    merged = os.path.samestat(os.fstat(out.fileno()), os.fstat(err.fileno()))
    outputs: dict[TextIO, TextIO] = {}
    for stream, number in ((out, STDOUT), (err, STDOUT if merged else STDERR)):
        fd = open_output_pipe(logs_pipe("", number), folder=folder)
        outputs[stream] = io.TextIOWrapper(io.FileIO(fd, "w"), encoding=stream.encoding, errors=stream.errors)
    return outputs


def tail_log(
    header: str,
    file: str,
    dst: TextIO,
    finished: Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
    **_: Any,
) -> None:
    """Effect: writes the lines of a log, as they come, as torch's tail_logfile does, which reads anything to its end.

    Of a regular file alone, and once the rank has ended, no further than the file reached then. Raises: OSError.
    """
    if file == os.devnull:  # The log of a rank that has none.
        return
    while (fd := _opened(file)) is None:
        if finished.is_set():
            return
        time.sleep(interval_sec)  # torch's pause: nothing tells when the file is there.
    with _Log(fd) as raw, io.TextIOWrapper(io.BufferedReader(raw), errors="replace") as log:
        rest, ended = 0, True
        while True:
            if finished.is_set() and raw.end is None:
                size = os.fstat(fd).st_size
                raw.end = min(size, raw.tell() + MAX_REST)
                rest = size - raw.end
            if text := log.read(MAX_TEXT):
                if not text.endswith("\n"):
                    text += log.readline(MAX_LINE)
                lines = io.StringIO(text)
                shown = "".join(header + line for line in lines if log_line_filter is None or log_line_filter(line))
                ended = shown.endswith("\n") if shown else ended
                _write(dst, shown)
            elif raw.end is not None:
                break
            else:
                time.sleep(interval_sec)  # torch's pause: nothing tells when there is more.
        if rest > 0:
            end_of_line = "" if ended else "\n"
            _write(dst, f"{end_of_line}{header}cpulaunch: {rest} more bytes are only in the log\n")


def _write(dst: TextIO, text: str) -> None:
    """Effect: writes the text, with escapes for characters that the encoding of `dst` lacks. Raises: OSError.

    At the first of these, torch stops showing the log. Other logs wait, as theirs would come into the middle of lines:
    a pipe takes no more than PIPE_BUF bytes at once. It takes a part when the process is stopped meanwhile, of which an
    unbuffered `dst` would drop the rest, and a buffered one what it has if it must not wait. Source: pipe(7).
    """
    try:
        fd = dst.fileno()
    except io.UnsupportedOperation:
        dst.write(_encoded(dst, text).decode(dst.encoding) if dst.encoding else text)
        return
    left = memoryview(_encoded(dst, text))
    with _lock_of(fd):
        while left:
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:  # A process that shares the descriptor may have made it non-blocking.
                select.select((), (fd,), ())


def _encoded(dst: TextIO, text: str) -> bytes:
    try:
        return text.encode(dst.encoding, dst.errors or "strict")
    except UnicodeEncodeError:
        return text.encode(dst.encoding, "backslashreplace")


def _lock_of(fd: int) -> threading.Lock:
    status = os.fstat(fd)  # stdout and stderr may be the same pipe.
    return _locks.setdefault((status.st_dev, status.st_ino), threading.Lock())


def _opened(file: str) -> int | None:
    """A descriptor of a log; None if there is none yet, or if a process has a lease on it. Raises: OSError."""
    try:
        return open_regular(file, links=True)
    except (FileNotFoundError, BlockingIOError):
        return None
