"""Streams of worker output, and the routes on which their lines, kept whole, reach sinks that several streams share."""

from __future__ import annotations

import fcntl
import os
import select
import sys
import termios

from cpulaunch.launch.output.sink import Sink, SinkError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpulaunch.launch.output.metrics import LineReader

READ_BYTES = 1 << 16
LINE_BYTES = 1 << 20
"""A longer line is written in parts, and no other stream writes to the same sink meanwhile."""

TAIL_BYTES = 1 << 13
TAIL_LINES = 20


class OutputRoute:
    """The way from one stream to one sink.

    `exclusive`: no other stream writes to the sink, so bytes pass at once; else as whole lines with the prefix.
    """

    def __init__(self, sink: Sink, *, prefix: bytes = b"", exclusive: bool) -> None:
        self.sink = sink
        self.line_bytes = 0
        self._prefix = prefix
        self._exclusive = exclusive
        self._buffer = bytearray()
        self._finished = False

    @property
    def blocked(self) -> bool:
        """Whether it can take no more data now."""
        return self.sink.congested or (self.must_wait and len(self._buffer) >= LINE_BYTES)

    @property
    def must_wait(self) -> bool:
        """Whether another stream is in the middle of a long line that is written."""
        return self.sink.line_owner not in (None, self) and not self.sink.is_lost

    @property
    def _has_output(self) -> bool:
        """Whether it would write something if no other stream were in the middle of a long line."""
        if self._finished or len(self._buffer) >= LINE_BYTES:
            return bool(self._buffer)
        return self._complete_bytes(owned=False) > 0

    @property
    def _is_inside_line(self) -> bool:
        """Whether the sink has the beginning of the line that is sent next."""
        return self.sink.line_owner is self

    def feed(self, data: bytes) -> None:
        """Effect: sends the data to the sink, or buffers it until a line is complete. Raises: SinkError."""
        if self._exclusive:
            self.sink.send(data)
            return
        self._buffer += data
        self.advance()

    def finish(self) -> None:
        """Effect: writes the stream's last line although it lacks a newline, as soon as no other owns the line."""
        self._finished = True
        if not self._exclusive:
            self.advance()

    def break_line(self) -> None:
        """Effect: ends the long line that this route is in the middle of, so that others may write."""
        if self._is_inside_line:
            self.sink.send(b"\n")
        self._release_line()

    def advance(self) -> None:
        """Effect: sends all that may be written now, or joins the sink's waiters."""
        if self.must_wait:
            if self not in self.sink.waiters and self._has_output:
                self.sink.waiters.append(self)
            return
        owned = self.sink.line_owner is self
        end = self._complete_bytes(owned=owned)
        if end:
            self._send(bytes(self._buffer[:end]))
            del self._buffer[:end]
            self.sink.line_owner = None
        if len(self._buffer) >= LINE_BYTES:
            self.line_bytes = len(self._buffer) + (self.line_bytes if self._is_inside_line else 0)
            self._send(bytes(self._buffer))
            self._buffer.clear()
            self.sink.line_owner = self
        if self._finished and (self._buffer or self.sink.line_owner is self):
            self._send_last_line()
        if owned and self.sink.line_owner is None:
            self._release_line()

    def _send_last_line(self) -> None:
        """Effect: sends the last line: unchanged to a log, with a newline where lines of several workers mix."""
        self._send(bytes(self._buffer) + (b"\n" if self._prefix else b""))
        self._buffer.clear()
        self.sink.line_owner = None
        self.sink.needs_newline = not self._prefix

    def _complete_bytes(self, *, owned: bool) -> int:
        """How many buffered bytes are whole lines, or else states of a progress bar, each ended by \\r."""
        end = self._buffer.rfind(b"\n") + 1
        # The last byte may be the \r of a \r\n whose \n is yet to come.
        return end if end or owned else self._buffer.rfind(b"\r", 0, -1) + 1

    def _release_line(self) -> None:
        self.sink.line_owner = None
        waiters, self.sink.waiters = self.sink.waiters, []
        for route in waiters:
            route.advance()

    def _send(self, data: bytes) -> None:
        lead = b"" if self._is_inside_line else self._prefix
        if self.sink.needs_newline:
            lead = b"\n" + lead
            self.sink.needs_newline = False
        if self._prefix:
            if self.sink.redraw_owner not in (None, self):
                lead = self.sink.redraw_separator + lead
            data = self._prefixed(data)
        self.sink.redraw_owner = self if data.endswith(b"\r") else None
        self.sink.send(lead + data)

    def _prefixed(self, data: bytes) -> bytes:
        """The data with the prefix at each line but the first, and at each state that \\r redraws."""
        end = 2 if data.endswith(b"\r\n") else 1
        body, last = data[:-end], data[-end:]
        if b"\r" in body:
            again = b"\r" + self._prefix
            body = body.replace(b"\r", again).replace(again + b"\n", b"\r\n")
        return body.replace(b"\n", b"\n" + self._prefix) + last


class Stream:
    """The read end of one worker's output, with its routes, its last lines for the summary, and its metric's reader."""

    def __init__(self, fd: int, *, routes: Sequence[OutputRoute], reader: LineReader | None = None) -> None:
        self.fd = fd
        self.routes = tuple(routes)
        self._reader = reader
        self._tail = b""
        self._left: int | None = None
        """How many bytes are still read; None: all that are written."""

    @property
    def has_unread(self) -> bool:
        """Whether `transfer` has something to read, or to notice the end."""
        return self._left != 0 and _is_readable(self.fd)

    @property
    def blocked(self) -> bool:
        """Whether data that is read now could only wait in memory."""
        return any(route.blocked for route in self.routes)

    @property
    def readers_gone(self) -> bool:
        """Whether the reader of every sink is gone. The worker should get an error then, as in a shell's pipe."""
        return bool(self.routes) and all(route.sink.reader_gone for route in self.routes)

    def limit(self) -> None:
        """Effect: reads no more than what is in the pipe now. Source: ioctl_pipe(2), FIONREAD."""
        self._left = int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)

    def transfer(self) -> bool:
        """Whether more output may follow. Effect: reads once and feeds what was read. Raises: SinkError."""
        try:
            data = os.read(self.fd, READ_BYTES if self._left is None else min(self._left, READ_BYTES))
        except BlockingIOError:
            return True
        except OSError:  # What a worker has spliced into it cannot be read, and is the first for ever.
            return False
        if not data:
            return False
        if self._left is not None:
            self._left -= len(data)
        self._tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self._tail + data)[-TAIL_BYTES:]
        try:
            self._send(lambda route: route.feed(data))
        finally:
            if self._reader is not None:
                self._reader.feed(data)
        return not self.readers_gone

    def close(self) -> None:
        """Effect: closes the pipe and writes unfinished lines. Raises: SinkError."""
        os.close(self.fd)
        if self._reader is not None:
            self._reader.finish()
        self._send(OutputRoute.finish)

    def _send(self, send: Callable[[OutputRoute], None]) -> None:
        """Effect: sends on every route, also after one whose sink cannot be written. Raises: SinkError for that."""
        failure = None
        for route in self.routes:
            try:
                send(route)
            except SinkError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def last_lines(self) -> tuple[str, ...]:
        """The last lines, at most 20, each as a terminal shows it in the end: a progress bar in its last state."""
        lines = self._tail.removesuffix(b"\n").split(b"\n") if self._tail else []
        if len(self._tail) >= TAIL_BYTES and len(lines) > 1:
            del lines[0]  # Its beginning may be lost.
        shown = [line.removesuffix(b"\r").rpartition(b"\r")[2] for line in lines[-TAIL_LINES:]]
        return tuple(line.decode(errors="replace") for line in shown)


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
