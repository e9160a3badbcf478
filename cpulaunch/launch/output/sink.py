"""A sink: a terminal, pipe or file that is written without ever blocking on a slow reader."""

from __future__ import annotations

import errno
import os
import select
import stat
import time

from cpulaunch.system.files.special import open_nonblocking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Writer(Protocol):
        """Writes lines into a sink that others write too."""

        line_bytes: int
        """How much of a long line it has written."""

        def advance(self) -> None:
            """Effect: sends what may be written now."""

        def break_line(self) -> None:
            """Effect: ends its unfinished line."""


BUFFER_BYTES = 1 << 20
ERASE_LINE = b"\x1b[K"
"""Erases to the end of the line. Source: ECMA-48, EL."""

ATOMIC_BYTES = 4096
"""A pipe that polls writable takes this much without blocking. Source: POSIX, PIPE_BUF; pipe(7)."""

NEWLINE, CARRIAGE_RETURN = 10, 13
PAUSE_SECONDS = 0.01
"""Between two writes to a reader that took nothing: poll(2) may call a terminal writable that has no room for more."""

HUNG_UP = (errno.EIO, errno.ENXIO)
"""The errors of a write to a terminal whose other side is gone."""


class SinkError(OSError):
    """Output cannot be written; `filename` names the sink."""


class Sink:
    """One destination. Data that cannot be written yet waits in memory; a `congested` sink should get no more.

    `reader_gone`: the reader has closed it, and nothing is written any more. Data for a terminal that has hung up is
    discarded.
    """

    def __init__(self, fd: int, *, name: str) -> None:
        self.fd = fd
        self.name = name
        self.reader_gone = False
        self.line_owner: Writer | None = None
        """The writer in the middle of a long line; `waiters` wait for the end of that line."""
        self.waiters: list[Writer] = []
        self.needs_newline = False
        """Whether the last line lacks its newline and its writer has ended."""
        self.redraw_owner: Writer | None = None
        """The writer whose last line ended in \\r and may be redrawn, as a progress bar is."""
        self.redraw_separator = b"\n"
        """What precedes a line of another writer then: a newline; on a terminal, the code that erases the old line."""
        self._pending = bytearray()
        self._last_byte = NEWLINE
        """What was written last, as if a line had ended before."""
        self._failed = self._abandoned = False
        self._writable: select.poll | None = None

    @classmethod
    def for_inherited(cls, fd: int, *, name: str) -> Sink:
        """The sink for an inherited descriptor, whose flags stay unchanged, as other processes share them."""
        mode = os.fstat(fd).st_mode
        terminal = os.isatty(fd)
        if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not terminal):
            return cls(os.dup(fd), name=name)
        own = open_nonblocking(fd) if stat.S_ISFIFO(mode) or terminal else None
        sink = cls(os.dup(fd) if own is None else own, name=name)
        if terminal:
            sink.redraw_separator = ERASE_LINE
        if own is None:
            sink._writable = select.poll()
            sink._writable.register(sink.fd, select.POLLOUT)
        return sink

    @property
    def is_lost(self) -> bool:
        """Whether nothing is written any more: its reader is gone, or it has failed or was abandoned."""
        return self.reader_gone or self._failed or self._abandoned

    @property
    def is_inside_line(self) -> bool:
        """Whether a line has been written in part, and others may write after it."""
        return self._last_byte != NEWLINE and not self.reader_gone and not self._failed

    @property
    def has_pending(self) -> bool:
        """Whether data waits for the reader."""
        return bool(self._pending) and not self._failed

    @property
    def congested(self) -> bool:
        """Whether as much data waits as memory should hold."""
        return len(self._pending) >= BUFFER_BYTES and not self._failed

    def send(self, data: bytes) -> None:
        """Effect: writes the data, now or in later calls of `flush`. Raises: SinkError."""
        if self.is_lost:
            return
        if self._pending:
            self._pending += data
            return
        written = self._write(data)
        if written < len(data) and not self.is_lost:
            self._pending += memoryview(data)[written:]

    def flush(self) -> None:
        """Effect: writes as much of the waiting data as the reader takes. Raises: SinkError."""
        if not self._failed:
            self._write_pending(len(self._pending))
        if self.is_lost:
            self._pending.clear()

    def end_line(self, seconds: float) -> bool:
        """Whether what has been written ends in a whole line, so that another process may write one. Raises: SinkError.

        Effect: writes the rest of a line within so many seconds; if no more of it is known, breaks it.
        """
        deadline = time.monotonic() + seconds
        while self.is_inside_line and not self._abandoned:
            if not self._pending:
                self._break_line()
            elif not self._write_pending(self._pending.find(b"\n") + 1 or len(self._pending)):
                time.sleep(PAUSE_SECONDS)
            if time.monotonic() >= deadline:
                break
        return not self.is_inside_line

    def _break_line(self) -> None:
        """Effect: ends the line that has been written in part; a progress bar gives way to what is written next."""
        if self.line_owner is not None:
            self.line_owner.break_line()
            return
        is_bar = self._last_byte == CARRIAGE_RETURN and self.redraw_owner is not None  # Else a \n may follow the \r.
        self.send(self.redraw_separator if is_bar else b"\n")
        self.needs_newline, self.redraw_owner = False, None
        if not self._pending:
            self._last_byte = NEWLINE

    def line_was_broken(self) -> None:
        """Effect: a newline that was written elsewhere counts as the end of the line that has been written in part."""
        self._last_byte = NEWLINE
        if self._pending.startswith(b"\n"):
            del self._pending[:1]

    def abandon(self) -> None:
        """Effect: data that still waits is lost, and nothing is written any more."""
        self._abandoned = True
        self._pending.clear()

    def close(self) -> None:
        """Effect: closes the descriptor; data that still waits is lost."""
        os.close(self.fd)

    def _write_pending(self, size: int) -> int:
        """How many bytes of the first `size` that wait were written."""
        with memoryview(self._pending)[:size] as view:
            written = self._write(view)
        del self._pending[:written]
        return written

    def _write(self, data: bytes | memoryview) -> int:
        """How many bytes were written before a write would have blocked."""
        written = 0
        with memoryview(data) as view:
            while written < len(view):
                if self._writable is not None and not self._writable.poll(0):
                    break
                end = len(view) if self._writable is None else written + ATOMIC_BYTES
                try:
                    written += os.write(self.fd, view[written:end])
                    self._last_byte = view[written - 1]
                except BlockingIOError:
                    break
                except (BrokenPipeError, ConnectionResetError):
                    self.reader_gone = True
                    break
                except OSError as error:
                    self._fail(error)
                    break
        return written

    def _fail(self, error: OSError) -> None:
        """Raises: SinkError, except for a terminal that has hung up."""
        self._failed = True
        if error.errno in HUNG_UP and not stat.S_ISREG(os.fstat(self.fd).st_mode):
            return
        raise SinkError(error.errno, error.strerror, self.name) from None
