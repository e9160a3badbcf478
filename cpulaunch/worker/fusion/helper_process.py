"""The worker's end of its helper process: started at the first request, asked without waiting."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from contextlib import suppress

from cpulaunch.records.torch_settings import OWN_VARIABLES
from cpulaunch.worker.fusion.search import TrialOutcome
from cpulaunch.worker.fusion.wire import decode_outcome

REMOVED = (*OWN_VARIABLES, "LD_BIND_NOW", "PYTHONSTARTUP", "PYTHONINSPECT")
"""Variables that the helper does not get: the plugin must not apply itself there."""

ADDED = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
"""The helper needs no GPU, and its threads must not spin on the worker's CPUs."""

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]);"
    "from cpulaunch.worker.fusion.helper import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
CHUNK_BYTES = 1 << 20


class HelperEndedError(Exception):
    """The helper process has ended without an answer."""


class HelperProcess:
    """A process that tries graphs. It ends when this object's socket is closed, at the latest with its worker."""

    def __init__(self) -> None:
        """Raises: OSError if no process can be started."""
        if getattr(sys, "frozen", False) or not sys.executable:
            raise OSError("this program is not run by a Python interpreter of its own")
        self.owner = os.getpid()
        own, other = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in REMOVED} | ADDED
        path = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
        arguments = [str(other.fileno()), str(self.owner), json.dumps(path)]
        with other:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", PROGRAM, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    cwd="/",
                    pass_fds=[other.fileno()],
                )
            except BaseException:
                own.close()
                raise
        own.setblocking(False)
        self._socket = own
        self._unsent = b""
        self._received = b""

    @property
    def pid(self) -> int:
        """The process id of the helper."""
        return self._process.pid

    def send(self, line: bytes) -> None:
        """Effect: sends the request now or, as far as the socket is full, at the next `receive`."""
        self._unsent += line

    def receive(self, seconds: float | None) -> list[tuple[str, TrialOutcome]]:
        """The outcomes that have arrived, with their keys; waits for the first one, at most this long (None: no limit).

        Effect: sends what is unsent. Raises: HelperEndedError.
        """
        outcomes: list[tuple[str, TrialOutcome]] = []
        while True:
            poll = select.poll()  # Not select(), which takes no descriptor above 1,023.
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ready = dict(poll.poll(None if seconds is None else seconds * 1000)).get(self._socket.fileno(), 0)
            if ready & select.POLLOUT:
                self._write()
            if ready & ~select.POLLOUT:
                outcomes += self._read()
            if outcomes or not ready:
                return outcomes

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise HelperEndedError(str(error)) from None

    def _read(self) -> list[tuple[str, TrialOutcome]]:
        try:
            chunk = self._socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise HelperEndedError(str(error)) from None
        if not chunk:
            raise HelperEndedError("it ended")
        *lines, self._received = (self._received + chunk).split(b"\n")
        try:
            return [decode_outcome(line) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise HelperEndedError(f"its answer is malformed: {error}") from None

    def close(self) -> None:
        """Effect: ends the helper, if this process has started it."""
        self._socket.close()
        if self.owner == os.getpid():
            with suppress(OSError):
                self._process.kill()
            self._process.wait()
