"""Where output goes: the terminal, a pipe or a file, written without ever blocking on a slow reader."""

from __future__ import annotations

import errno
import os
import select
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Writer(Protocol):
        """Something that writes lines into a sink, and can be told that it is its turn."""

        def advance(self) -> None:
            """Effect: what may be written now is on its way."""

        def break_line(self) -> None:
            """Effect: its unfinished line ends here."""


BUFFER_BYTES = 1 << 20
ERASE_LINE = b"\x1b[K"
"""To the end of the line. Source: ECMA-48, EL."""

CAREFUL_BYTES = 4096
"""A pipe that polls writable takes this much without blocking. Source: POSIX, PIPE_BUF; pipe(7)."""

HUNG_UP = (errno.EIO, errno.ENXIO)
"""What a terminal whose other side is gone answers."""


class SinkError(OSError):
    """Output that was asked for cannot be written; `filename` is where."""


class Sink:
    """One destination. Data that cannot be written yet waits in memory; `congested` asks to send no more.

    `gone`: its reader closed it, nothing is written any more. A hung-up terminal swallows what it gets.
    """

    def __init__(self, fd: int, *, name: str) -> None:
        self.fd = fd
        self.name = name
        self.gone = False
        self.holder: Writer | None = None
        """Whoever is in the middle of a long line here; `waiters` wait for its end."""
        self.waiters: list[Writer] = []
        self.unfinished = False
        """Whether the last line here lacks its newline and its writer has gone."""
        self.redrawn_by: Writer | None = None
        """Whose line ended here in \\r, to be drawn anew: another's would be mixed with what stands there."""
        self.over_state = b"\n"
        """What must precede another's line then: a new line, or on a terminal the wiping of the old one."""
        self._pending = bytearray()
        self._dead = False
        self._polled: select.poll | None = None

    @classmethod
    def of_descriptor(cls, fd: int, *, name: str) -> Sink:
        """The sink for an inherited descriptor, whose flags (shared with other processes) stay as they are."""
        mode = os.fstat(fd).st_mode
        terminal = os.isatty(fd)
        if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not terminal):
            return cls(os.dup(fd), name=name)
        own = _own_description(fd) if stat.S_ISFIFO(mode) or terminal else None
        sink = cls(os.dup(fd) if own is None else own, name=name)
        if terminal:
            sink.over_state = ERASE_LINE
        if own is None:
            sink._polled = select.poll()
            sink._polled.register(sink.fd, select.POLLOUT)
        return sink

    @property
    def waiting(self) -> bool:
        """Whether data waits for the reader."""
        return bool(self._pending) and not self._dead

    @property
    def congested(self) -> bool:
        """Whether more data waits than should be kept in memory."""
        return len(self._pending) >= BUFFER_BYTES and not self._dead

    def send(self, data: bytes) -> None:
        """Effect: the data is written, now or by later calls of `flush`. Raises: SinkError."""
        if self.gone or self._dead:
            return
        if self._pending:
            self._pending += data
            return
        written = self._write(data)
        if written < len(data) and not (self.gone or self._dead):
            self._pending += memoryview(data)[written:]

    def flush(self) -> None:
        """Effect: as much of the waiting data as fits is written. Raises: SinkError."""
        if not self._dead:
            with memoryview(self._pending) as view:
                written = self._write(view)
            del self._pending[:written]
        if self.gone or self._dead:
            self._pending.clear()

    def close(self) -> None:
        """Effect: the descriptor is closed; what still waits is lost."""
        os.close(self.fd)

    def _write(self, data: bytes | memoryview) -> int:
        """How many bytes were taken before the reader made us wait."""
        written = 0
        with memoryview(data) as view:
            while written < len(view):
                if self._polled is not None and not self._polled.poll(0):
                    break
                end = len(view) if self._polled is None else written + CAREFUL_BYTES
                try:
                    written += os.write(self.fd, view[written:end])
                except BlockingIOError:
                    break
                except (BrokenPipeError, ConnectionResetError):
                    self.gone = True
                    break
                except OSError as error:
                    self._failed(error)
                    break
        return written

    def _failed(self, error: OSError) -> None:
        self._dead = True
        if error.errno in HUNG_UP and not stat.S_ISREG(os.fstat(self.fd).st_mode):
            return
        raise SinkError(error.errno, error.strerror, self.name) from None


def _own_description(fd: int) -> int | None:
    """A new, non-blocking description of the same pipe or terminal; None if there is none to be had.

    Without /proc, or where it is another user's: then small writes that cannot block must do.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
