"""All streams and sinks of a launch, moved as they become ready and never further than memory allows."""

from __future__ import annotations

import select

from cpulaunch.launch.output.sink import Sink
from cpulaunch.launch.output.streams import Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

STALL_SECONDS = 1.0
"""How long a worker silent in the middle of a long line may hold up others whose buffers are full."""


class Pump:
    """Registers what is worth waiting for with a poll object, and serves what became ready."""

    def __init__(self, poll: select.poll, *, streams: Iterable[Stream], sinks: Iterable[Sink]) -> None:
        self._poll = poll
        self._streams = {stream.fd: stream for stream in streams}
        self._sinks = {sink.fd: sink for sink in sinks}
        self._paused: set[int] = set()
        self._watched: set[int] = set()
        self._stall_deadline: float | None = None
        for fd in self._streams:
            poll.register(fd, select.POLLIN)

    @property
    def idle(self) -> bool:
        """Whether all that was read is written."""
        return not any(sink.waiting for sink in self._sinks.values())

    @property
    def deadline(self) -> float | None:
        """When a silent holder of a sink is to be broken off; None almost always."""
        return self._stall_deadline

    def owns(self, fd: int) -> bool:
        """Whether this descriptor's readiness is for `serve`."""
        return fd in self._streams or fd in self._sinks

    def serve(self, fd: int) -> None:
        """Effect: one read or write. Raises: SinkError."""
        if fd in self._sinks:
            self._sinks[fd].flush()
        elif fd in self._streams and fd not in self._paused:
            stream = self._streams[fd]
            if any(route.sink.holder is route for route in stream.routes):
                self._stall_deadline = None
            if not stream.pump():
                self._end(stream)

    def settle(self, now: float) -> None:
        """Effect: after serving, what should be waited for is. Raises: SinkError."""
        self._break_stalled_lines(now)
        self._watch_sinks()
        if not self._paused and not any(sink.congested or sink.holder for sink in self._sinks.values()):
            return
        for fd, stream in self._streams.items():
            if stream.blocked != (fd in self._paused):
                self._pause(fd) if stream.blocked else self._resume(fd)
        if self._stall_deadline is None and self._held_up():
            self._stall_deadline = now + STALL_SECONDS

    def drain(self) -> None:
        """Effect: all that workers left in their pipes is read. Raises: SinkError."""
        for stream in list(self._streams.values()):
            while not stream.blocked and _readable(stream.fd):
                if not stream.pump():
                    self._end(stream)
                    break

    @property
    def undrained(self) -> bool:
        """Whether a pipe may still hold output that waits for a slow reader."""
        return any(_readable(stream.fd) for stream in self._streams.values())

    def finish(self) -> None:
        """Effect: every stream is closed, unfinished lines are on their way. Raises: SinkError."""
        for stream in list(self._streams.values()):
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        if stream.fd not in self._paused:
            self._poll.unregister(stream.fd)
        self._paused.discard(stream.fd)
        del self._streams[stream.fd]
        stream.close()

    def _pause(self, fd: int) -> None:
        self._paused.add(fd)
        self._poll.unregister(fd)

    def _resume(self, fd: int) -> None:
        self._paused.discard(fd)
        self._poll.register(fd, select.POLLIN)

    def _watch_sinks(self) -> None:
        for fd, sink in self._sinks.items():
            if sink.waiting and fd not in self._watched:
                self._watched.add(fd)
                self._poll.register(fd, select.POLLOUT)
            elif not sink.waiting and fd in self._watched:
                self._watched.discard(fd)
                self._poll.unregister(fd)

    def _held_up(self) -> list[Sink]:
        """Sinks that full streams cannot write to because another is in the middle of a line."""
        return [route.sink for fd in self._paused for route in self._streams[fd].routes if route.must_wait]

    def _break_stalled_lines(self, now: float) -> None:
        """Effect: a line whose writer has been silent while others are full of waiting is broken in two."""
        if self._stall_deadline is None or now < self._stall_deadline:
            return
        self._stall_deadline = None
        for sink in self._held_up():
            if sink.holder is not None:
                sink.holder.break_line()


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
