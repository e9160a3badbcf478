"""Connections of a group's ranks, accepted side by side with those of strangers, which cannot delay them."""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress
from hmac import compare_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

TOKEN_BYTES = 32
PROCESS = struct.Struct("<II")
"""A message: a rank of the group and its process id."""
MESSAGE_BYTES = TOKEN_BYTES + PROCESS.size
HANDSHAKE_SECONDS = 10
"""Time within which a connected rank must identify itself, however many bytes it sends meanwhile."""
RETRY_SECONDS = 0.01
MAX_CALLERS = 256
"""At most this many connections, beyond those of the ranks, may be unidentified; then the oldest one is closed."""


class _Caller:
    """A connection whose peer has not identified itself yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS

    def read(self) -> bool:
        """Whether nothing more is to be read: the message is complete, or the peer has closed the connection."""
        try:
            data = self.connection.recv(MESSAGE_BYTES - len(self.received))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.received += data
        return not data or len(self.received) == MESSAGE_BYTES

    def process(self, token: bytes) -> tuple[int, int] | None:
        """The rank and process id in the message; None if the peer does not know the token."""
        complete = len(self.received) == MESSAGE_BYTES
        if not complete or not compare_digest(self.received[:TOKEN_BYTES], token):
            return None
        rank, process = PROCESS.unpack(self.received[TOKEN_BYTES:])
        return rank, process


class Handshakes:
    """The unidentified connections of a listener. Close it, and they are closed."""

    def __init__(self, listener: socket.socket, *, token: bytes, ranks: Collection[int]) -> None:
        listener.setblocking(False)
        self._listener, self._token = listener, token
        self._missing = set(ranks)
        self._most = MAX_CALLERS + len(ranks)
        self._callers: dict[int, _Caller] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def accept(self, deadline: float) -> Iterator[tuple[socket.socket, int, int]]:
        """The connection, rank and process id of each rank, in the order of their messages.

        Raises: TimeoutError if not all have identified themselves by the deadline.
        """
        while self._missing:
            for caller in self._ready(deadline):
                found = caller.process(self._token)
                self._forget(caller)
                if found is None or found[0] not in self._missing:
                    caller.connection.close()  # Not a rank of the group, for example a port scan.
                    continue
                self._missing.discard(found[0])
                yield (caller.connection, *found)

    def _ready(self, deadline: float) -> list[_Caller]:
        """The callers that have identified themselves or left. Effect: accepts new ones, closes those that are late."""
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError
        wake = min((deadline, *(caller.deadline for caller in self._callers.values())))
        done = []
        for fd, _ in self._poll.poll(max(0.0, wake - now) * 1000 + 1):
            if fd == self._listener.fileno():
                self._accept_waiting()
            elif fd in self._callers and self._callers[fd].read():
                done.append(self._callers[fd])
        for caller in [each for each in self._callers.values() if each.deadline <= time.monotonic()]:
            if caller not in done:
                self._close(caller)
        return done

    def _accept_waiting(self) -> None:
        for _ in range(self._most):
            try:
                connection = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:  # The peer has gone, or the limit of open files is reached.
                if self._callers:
                    self._close(next(iter(self._callers.values())))
                time.sleep(RETRY_SECONDS)
                return
            connection.setblocking(False)
            self._callers[connection.fileno()] = _Caller(connection)
            self._poll.register(connection, select.POLLIN)
            if len(self._callers) > self._most:
                self._close(next(iter(self._callers.values())))

    def _forget(self, caller: _Caller) -> None:
        """Effect: the connection is no longer watched."""
        del self._callers[caller.connection.fileno()]
        self._poll.unregister(caller.connection)

    def _close(self, caller: _Caller) -> None:
        self._forget(caller)
        with suppress(OSError):
            caller.connection.close()

    def close(self) -> None:
        """Effect: closes the connections that are not identified."""
        for caller in list(self._callers.values()):
            self._close(caller)
