"""What the workers write: whole lines with a prefix, into sinks that several of them share."""

from __future__ import annotations

import os

from cpulaunch.launch.output.sink import Sink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.launch.output.metrics import LineReader

READ_BYTES = 1 << 16
LINE_BYTES = 1 << 20
"""A line longer than this is written in parts, while nobody else writes to the same sink."""

TAIL_BYTES = 1 << 13
TAIL_LINES = 20


class OutputRoute:
    """The way from one stream to one sink. Alone there, bytes pass at once; else as whole lines with a prefix."""

    def __init__(self, sink: Sink, *, prefix: bytes = b"", alone: bool) -> None:
        self.sink = sink
        self._prefix = prefix
        self._alone = alone
        self._rest = bytearray()
        self._finished = False

    @property
    def blocked(self) -> bool:
        """Whether it can take no more data now."""
        return self.sink.congested or (self.must_wait and len(self._rest) >= LINE_BYTES)

    @property
    def must_wait(self) -> bool:
        """Whether another stream is in the middle of a long line."""
        return self.sink.holder is not None and self.sink.holder is not self

    def feed(self, data: bytes) -> None:
        """Effect: the data is on its way. Raises: SinkError."""
        if self._alone:
            self.sink.send(data)
            return
        self._rest += data
        self.advance()

    def finish(self) -> None:
        """Effect: what the stream left without a newline is written as a line, now or when others let it."""
        self._finished = True
        if not self._alone:
            self.advance()

    def break_line(self) -> None:
        """Effect: the long line in the middle of which it is ends here, and others may write."""
        self.sink.send(b"\n")
        self._let_others()

    def advance(self) -> None:
        """Effect: all that may be written now is on its way, or waits for its turn."""
        if self.must_wait:
            if self not in self.sink.waiters:
                self.sink.waiters.append(self)
            return
        held = self.sink.holder is self
        end = self._complete(held=held)
        if end:
            self._send(bytes(self._rest[:end]))
            del self._rest[:end]
            self.sink.holder = None
        if len(self._rest) >= LINE_BYTES:
            self._send(bytes(self._rest))
            self._rest.clear()
            self.sink.holder = self
        if self._finished and (self._rest or self.sink.holder is self):
            self._end_line()
        if held and self.sink.holder is None:
            self._let_others()

    def _end_line(self) -> None:
        """Effect: a last line is as the worker left it in a log, and a whole line among other workers'."""
        self._send(bytes(self._rest) + (b"\n" if self._prefix else b""))
        self._rest.clear()
        self.sink.holder = None
        self.sink.unfinished = not self._prefix

    def _complete(self, *, held: bool) -> int:
        """How much of what waits is whole lines, or states of a progress bar (it redraws its line after \\r)."""
        end = self._rest.rfind(b"\n") + 1
        # A last \r may yet become \r\n.
        return end if end or held else self._rest.rfind(b"\r", 0, -1) + 1

    def _let_others(self) -> None:
        self.sink.holder = None
        waiters, self.sink.waiters = self.sink.waiters, []
        for route in waiters:
            route.advance()

    def _send(self, data: bytes) -> None:
        lead = b"" if self.sink.holder is self else self._prefix
        if self.sink.unfinished:
            lead = b"\n" + lead
            self.sink.unfinished = False
        if self._prefix:
            if self.sink.redrawn_by not in (None, self):
                lead = self.sink.over_state + lead
            self.sink.redrawn_by = self if data.endswith(b"\r") else None
            data = self._prefixed(data)
        self.sink.send(lead + data)

    def _prefixed(self, data: bytes) -> bytes:
        """The data with the prefix wherever, after its start, a line begins or is drawn anew (\\r)."""
        end = 2 if data.endswith(b"\r\n") else 1
        body, last = data[:-end], data[-end:]
        if b"\r" in body:
            again = b"\r" + self._prefix
            body = body.replace(b"\r", again).replace(again + b"\n", b"\r\n")
        return body.replace(b"\n", b"\n" + self._prefix) + last


class Stream:
    """The read end of one worker's output: `routes` to follow, its last lines for the summary, who reads along."""

    def __init__(self, fd: int, *, routes: Sequence[OutputRoute], reader: LineReader | None = None) -> None:
        self.fd = fd
        self.routes = tuple(routes)
        self._reader = reader
        self._tail = b""

    @property
    def blocked(self) -> bool:
        """Whether reading more would only fill memory."""
        return any(route.blocked for route in self.routes)

    @property
    def unread(self) -> bool:
        """Whether all who would have read it are gone; its writer should learn of it."""
        return bool(self.routes) and all(route.sink.gone for route in self.routes)

    def pump(self) -> bool:
        """Whether there may be more. Effect: one read's worth is on its way. Raises: SinkError."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self._tail + data)[-TAIL_BYTES:]
        for route in self.routes:
            route.feed(data)
        if self._reader is not None:
            self._reader.feed(data)
        return not self.unread

    def close(self) -> None:
        """Effect: nothing is read any more and unfinished lines are written. Raises: SinkError."""
        os.close(self.fd)
        if self._reader is not None:
            self._reader.finish()
        for route in self.routes:
            route.finish()

    def last_lines(self) -> tuple[str, ...]:
        """The last lines it carried, at most 20, each as a terminal leaves it: the last state of a progress bar."""
        lines = self._tail.removesuffix(b"\n").split(b"\n") if self._tail else []
        if len(self._tail) >= TAIL_BYTES and len(lines) > 1:
            del lines[0]  # Its beginning may be lost.
        shown = [line.removesuffix(b"\r").rpartition(b"\r")[2] for line in lines[-TAIL_LINES:]]
        return tuple(line.decode(errors="replace") for line in shown)
