"""Moves output from all streams to all sinks as they become ready, with bounded memory."""

from __future__ import annotations

import select

from cpulaunch.launch.output.sink import Sink
from cpulaunch.launch.output.streams import Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cpulaunch.launch.output.sink import Writer

STALL_SECONDS = 1.0
"""How long a worker that is silent in the middle of a long line may block others whose buffers are full."""
HELD_SECONDS = 5.0
"""How long any line may, unless the worker's last such line was broken: then for STALL_SECONDS too."""
HELD_BYTES = 1 << 26
"""How long a line may be that others wait for: the seconds do not pass while the reader of the sink is slow."""
NEVER = float("inf")


class Pump:
    """Polls streams and sinks while they have something to transfer, and serves those that are ready."""

    def __init__(self, poll: select.poll, *, streams: Iterable[Stream], sinks: Iterable[Sink]) -> None:
        self._poll = poll
        self._streams = {stream.fd: stream for stream in streams}
        self._sinks = {sink.fd: sink for sink in sinks}
        self._paused: set[int] = set()
        self._polled_sinks: set[int] = set()
        self._stalls: dict[Writer, float] = {}
        """When to break the long line of a worker that blocks others, unless it writes before."""
        self._held: dict[Writer, float] = {}
        """When to break it even so."""
        self._slow: set[Writer] = set()
        """Whose sink was congested at the last update."""
        self._updated = 0.0
        self._broken: set[Writer] = set()
        for fd in self._streams:
            poll.register(fd, select.POLLIN)

    @property
    def all_written(self) -> bool:
        """Whether every sink has written all that was read."""
        return not any(sink.has_pending for sink in self._sinks.values())

    @property
    def deadline(self) -> float | None:
        """When to break the line of a worker that blocks others (monotonic seconds); None if there is none."""
        return min((*self._stalls.values(), *self._held.values()), default=None)

    def owns(self, fd: int) -> bool:
        """Whether this descriptor is one of a stream or a sink."""
        return fd in self._streams or fd in self._sinks

    def serve(self, fd: int) -> None:
        """Effect: reads or writes this descriptor once. Raises: SinkError."""
        if fd in self._sinks:
            self._sinks[fd].flush()
        elif fd in self._streams and fd not in self._paused:
            stream = self._streams[fd]
            for route in stream.routes:
                self._stalls.pop(route, None)
            if not stream.transfer():
                self._end(stream)

    def update_polling(self, now: float) -> None:
        """Effect: pauses blocked streams, resumes others, and polls sinks with pending data. Raises: SinkError."""
        self._move_deadlines(now)
        self._break_held_lines(now)
        self._poll_pending_sinks()
        if not (self._paused or self._held or any(sink.congested or sink.line_owner for sink in self._sinks.values())):
            return
        for fd, stream in self._streams.items():
            if stream.blocked != (fd in self._paused):
                self._pause(fd) if stream.blocked else self._resume(fd)
        self._set_deadlines(now)

    def limit(self) -> None:
        """Effect: all output is in the pipes now; what others write there from now on is not read.

        The workers have ended, but a process that holds a pipe need not have: of another user, or from outside.
        """
        for stream in self._streams.values():
            stream.limit()

    def drain(self) -> bool:
        """Whether a worker had left output in its pipe, and no sink is congested.

        Effect: reads a part of it, as that may take long. Raises: SinkError.
        """
        stream = next((each for each in self._streams.values() if each.has_unread and not each.blocked), None)
        if stream is not None and not stream.transfer():
            self._end(stream)
        return stream is not None

    @property
    def has_unread_output(self) -> bool:
        """Whether a pipe still holds output, because the reader of a sink is slow."""
        return any(stream.has_unread for stream in self._streams.values())

    def abandon_waiting(self) -> bool:
        """Whether slow readers, or long lines, held up others, such as logs. Raises: SinkError.

        Effect: these readers get nothing any more, and these lines are broken.
        """
        slow, owners = [sink for sink in self._sinks.values() if sink.has_pending], self._blocking()
        for sink in slow:
            sink.abandon()
        for owner in owners:
            owner.break_line()
        return bool(slow or owners)

    def finish(self) -> bool:
        """Whether there was a stream. Effect: closes it and sends its unfinished line. Raises: SinkError."""
        stream = next(iter(self._streams.values()), None)
        if stream is not None:
            self._end(stream)
        return stream is not None

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

    def _poll_pending_sinks(self) -> None:
        for fd, sink in self._sinks.items():
            if sink.has_pending and fd not in self._polled_sinks:
                self._polled_sinks.add(fd)
                self._poll.register(fd, select.POLLOUT)
            elif not sink.has_pending and fd in self._polled_sinks:
                self._polled_sinks.discard(fd)
                self._poll.unregister(fd)

    def _blocking(self) -> dict[Writer, Sink]:
        """The routes in the middle of a long line that others wait for, with their sinks."""
        sinks = (sink for sink in self._sinks.values() if sink.waiters)
        return {sink.line_owner: sink for sink in sinks if sink.line_owner is not None}

    def _set_deadlines(self, now: float) -> None:
        """Effect: each line that blocks others has its deadlines, and no other line has."""
        blocking = self._blocking()
        full = {route.sink for fd in self._paused for route in self._streams[fd].routes if route.must_wait}
        self._broken -= self._held.keys() - blocking.keys()  # Their lines ended in time.
        self._held = {
            owner: self._held.get(owner, now + (STALL_SECONDS if owner in self._broken else HELD_SECONDS))
            for owner in blocking
        }
        self._stalls = {
            owner: self._stalls.get(owner, now + STALL_SECONDS) for owner, sink in blocking.items() if sink in full
        }
        self._slow = {owner for owner, sink in blocking.items() if sink.congested}

    def _move_deadlines(self, now: float) -> None:
        """Effect: the time since the last update does not count for workers that could not write.

        That is so while their sink is congested, and if the launcher was stopped, as by Ctrl-Z: it is called late.
        """
        passed, self._updated = now - self._updated, now
        if self.deadline is None:
            return
        stopped = now > self.deadline + STALL_SECONDS
        for deadlines in (self._stalls, self._held):
            for owner in deadlines.keys() if stopped else deadlines.keys() & self._slow:
                deadlines[owner] += passed

    def _break_held_lines(self, now: float) -> None:
        """Effect: ends each line that blocks others past a deadline, or that is too long."""
        if not self._held:
            return
        for owner in self._blocking():
            late = now >= min(self._stalls.get(owner, NEVER), self._held.get(owner, NEVER))
            if late:
                self._broken.add(owner)
            if late or owner.line_bytes >= HELD_BYTES:
                self._stalls.pop(owner, None)
                self._held.pop(owner, None)
                owner.break_line()
