"""The worker's end of its helper process: started at the first request, asked without waiting."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from cpulaunch.worker.fusion.search import TrialOutcome
from cpulaunch.worker.fusion.wire import decode_outcome

PASSED_ON = ("PATH", "HOME", "TMPDIR", "TZ", "LANG", "GLIBC_TUNABLES")
PASSED_ON_PREFIXES = (
    *("LC_", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "TORCH", "PYTORCH_", "ATEN_", "MALLOC_"),
)
"""Variables that decide how torch is found and how it computes. The helper gets no others: some are secret."""

REMOVED = ("LD_BIND_NOW",)
ADDED = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
"""There the plugin must not apply itself, GPUs are not needed, and threads must not spin on the worker's CPUs."""

CHECKED_ALLOCATOR, CHECK = "libc_malloc_debug.so.0", "glibc.malloc.check=3"
"""glibc ends a process that writes beyond a block of memory, when it frees the block. Without glibc they do nothing.

Some graphs write a result to the memory of another tensor, which may be smaller: (x @ y.T @ y) + z + y. Seen with torch
2.13. By chance such a graph works when it is tried, and ends the worker later. Source: mallopt(3), M_CHECK_ACTION.
glibc 2.39 and later ignore all tunables where one is malformed: elf/dl-tunables.c, parse_tunables_string.
"""

ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc", "tbbmalloc")
"""Parts of the names of libraries that replace the allocator."""

PROGRAM = os.path.join(os.path.dirname(__file__), "helper.py")
CHUNK_BYTES = 1 << 20
START_SECONDS = 20.0
"""Limit for the start of the helper, for which the program waits."""

PATIENCE_SECONDS = (10.0, 2.0, 2.0, 60.0)
"""For how long the helper waits for CPUs that are idle, by how many earlier starts and forks of the program had the
same graph as the first one that was unknown; those that still run count too.

A program that keeps all of its CPUs busy for longer is likely to run for long enough to gain by the graph what the
helper takes from it then. One that is started again gains by it each time; but one that has ended too early three times
loses by each more. If a program leaves CPUs idle, it must not be slowed in any case.
"""

STARVED = b"starved"


class HelperEndedError(Exception):
    """The helper process has ended without an answer."""


class HelperStarvedError(HelperEndedError):
    """The helper process has ended because it found no idle CPUs."""


class HelperProcess:
    """A process that tries graphs. It ends when this object's socket is closed, at the latest with its worker."""

    def __init__(self, folder: str, *, patience: float = PATIENCE_SECONDS[0]) -> None:
        """`folder`: where it keeps outcomes. Raises: OSError if no process can be started.

        `patience`: for how many seconds it waits for idle CPUs; 0: it takes a small share of those that are not.
        """
        if getattr(sys, "frozen", False) or not sys.executable:
            raise OSError("this program is not run by a Python interpreter of its own")
        self.owner = os.getpid()
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        try:
            with other:
                _start(self._socket, other, patience)
            self.pid, self._pidfd = _introduced(self._socket)
        except BaseException:
            self._socket.close()
            raise
        self._status = os.fstat(self._socket.fileno())
        self._unsent = json.dumps({"path": module_folders(), "folder": folder}).encode() + b"\n"
        self._received = b""

    def send(self, line: bytes) -> None:
        """Effect: sends the request now or, as far as the socket is full, at the next `receive`."""
        self._unsent += line

    def receive(self, seconds: float | None) -> list[tuple[str, TrialOutcome]]:
        """The outcomes that have arrived, with their keys; waits for the first one, at most this long (None: no limit).

        Effect: sends what is unsent. Raises: HelperEndedError.
        """
        if not self._is_connected():
            raise HelperEndedError("the program has closed its socket")
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
        if STARVED in lines:
            raise HelperStarvedError("it found no idle CPUs")
        try:
            return [decode_outcome(line) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise HelperEndedError(f"its answer is malformed: {error}") from None

    def _is_connected(self) -> bool:
        """Whether the socket is still open. Programs close descriptors that they do not know; their numbers recur."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._socket.fileno()), self._status)
        return False

    def close(self) -> None:
        """Effect: ends the helper, also a stopped one, if this process has started it.

        Where the program has closed the socket, the helper ends by itself, and both descriptors may be other files.
        """
        pidfd, self._pidfd = self._pidfd, None
        if not self._is_connected():
            self._socket.detach()
            return
        self._socket.close()
        if pidfd is None:
            return
        with suppress(OSError):  # This one alone may be another file, too.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL if self.owner == os.getpid() else 0)
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED)  # A worker that is process 1 has adopted it.
            os.close(pidfd)


def module_folders() -> list[str]:
    """Folders in which the helper finds torch and this package as the program does.

    The one that Python puts first, that of the script or, with -m, the current one, is none unless either is there, or
    PYTHONPATH names it: anyone may have put modules of any name into it.
    """
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    top = os.path.realpath(getattr(main, "__file__", None) or "/")
    for _ in range(str(name or "").count(".") + 1):  # Of a program that is a folder, one too.
        top = os.path.dirname(top)
    implied = {top} if name is None or sys.path[:1] == [top] else set()  # With -m, it may be in site-packages.
    if name is not None:
        with suppress(OSError):  # It was removed.
            implied.add(os.getcwd())
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("torch", "cpulaunch"))
    kept = {os.path.dirname(os.path.dirname(file)) for file in files if file}
    kept |= {os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each}
    folders = (each for each in sys.path if isinstance(each, str) and os.path.isabs(each))
    return [each for each in folders if each not in implied or each in kept]


def _start(own: socket.socket, other: socket.socket, patience: float) -> None:
    """Effect: starts a process that starts the helper, and waits until it has ended. Raises: OSError."""
    worker = _own_pidfd()
    descriptors = [other.fileno()] if worker is None else [other.fileno(), worker]
    arguments = [str(other.fileno()), str(-1 if worker is None else worker), str(patience)]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(os.environ),
            cwd="/",
            pass_fds=descriptors,
        )
    finally:
        if worker is not None:
            os.close(worker)
    other.close()
    poll = select.poll()
    poll.register(own, select.POLLIN)
    if not poll.poll(START_SECONDS * 1000):
        process.kill()
    process.wait()  # Without an error where the program has waited for this process in another thread.


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that the helper gets of these."""
    passed_on = {
        name: value
        for name, value in variables.items()
        if name in PASSED_ON or (name.startswith(PASSED_ON_PREFIXES) and name not in REMOVED)
    }
    preloads = [each for each in re.split("[: ]+", variables.get("LD_PRELOAD", "")) if each and not _allocates(each)]
    tunables = [each for each in variables.get("GLIBC_TUNABLES", "").split(":") if each.count("=") == 1]
    checked = {"LD_PRELOAD": ":".join([CHECKED_ALLOCATOR, *preloads]), "GLIBC_TUNABLES": ":".join([*tunables, CHECK])}
    return passed_on | ADDED | checked


def _allocates(library: str) -> bool:
    """Whether a preloaded library is an allocator: memory of two could not be told apart."""
    return any(name in os.path.basename(library) for name in ALLOCATORS)


def _own_pidfd() -> int | None:
    """A pidfd of this process; None where there are none: before Linux 5.3, in some sandboxes."""
    with suppress(OSError, AttributeError):
        return os.pidfd_open(os.getpid())
    return None


def _introduced(own: socket.socket) -> tuple[int, int | None]:
    """The process id of the helper, and its pidfd if there are any. Raises: OSError."""
    line, descriptors, _, _ = socket.recv_fds(own, 64, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not line.strip().isdigit():
        raise OSError("the process ended at its start")
    return int(line), descriptors[0] if descriptors else None
