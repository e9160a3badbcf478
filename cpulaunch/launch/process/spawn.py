"""Starting one worker process in a group of its own, bound and connected, and the reason if it cannot start."""

from __future__ import annotations

import os

from cpulaunch.launch.process.bind import apply_binding
from cpulaunch.launch.process.descriptors import DescriptorLimit, StdioFds, fork_error, restore_fd_limit
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.process.program import exec_error
from cpulaunch.launch.process.replace import reset_dispositions
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import record
from cpulaunch.system.libc import die_with_parent, private_pipe
from cpulaunch.system.signals import signal
from cpulaunch.system.terminal import leave_terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

MAX_MESSAGE_BYTES = 100
"""Of the message of a worker that was not executed, "STAGE ERRNO"."""


@record
class Inherited:
    """What each worker gets as this launch got it: the signal mask and, if it was raised, the limit on open files."""

    signal_mask: frozenset[int]
    descriptor_limit: DescriptorLimit | None = None


@record
class SpawnedWorker:
    """A forked worker. `pid` is its process group too; `error_fd` is the pipe that says why it was not executed."""

    pid: int
    error_fd: int


def spawn(spec: ExecSpec, *, stdio: StdioFds, inherited: Inherited) -> SpawnedWorker:
    """The forked process; `check_executed` tells whether it runs its program. Effect: closes `stdio.owned`.

    Raises: LaunchError.
    """
    read, write = private_pipe()  # A successful exec closes it, which a worker that runs already may delay, by SIGSTOP.
    os.set_blocking(read, False)
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        raise fork_error(error) from None
    if pid == 0:
        _become_worker(spec, stdio=stdio, inherited=inherited, parent=parent, error_fd=write)
    os.close(write)
    _make_group(pid)
    for fd in stdio.owned:
        os.close(fd)
    return SpawnedWorker(pid=pid, error_fd=read)


def _make_group(pid: int) -> None:
    """Effect: the child's process group exists. The child makes it too, as either process may run first."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        return  # It has executed already, or ended.


def check_executed(spec: ExecSpec, error_fd: int) -> bool:
    """Whether the worker has executed its program, or has ended before; False while it does neither.

    Raises: LaunchError, NotExecutableError.
    """
    try:
        message = os.read(error_fd, MAX_MESSAGE_BYTES).decode(errors="replace")
    except BlockingIOError:
        return False
    if not message:
        return True
    try:
        stage, code = message.split(" ")
        number, reason = int(code), os.strerror(int(code))
    except (ValueError, OverflowError):  # Another process has written it, into a copy of the descriptor.
        return True
    if stage == "execve":
        raise exec_error(spec.path, number)
    raise LaunchError(
        f"worker {spec.worker} could not be started", value=stage, source=reason, hint="try --binder none"
    )


def _become_worker(spec: ExecSpec, *, stdio: StdioFds, inherited: Inherited, parent: int, error_fd: int) -> NoReturn:
    """Effect: this forked child becomes the worker, or writes "STAGE ERRNO" to `error_fd` and ends.

    The worker has no terminal: in a group of its own, it would be stopped when it asks there for a password.
    """
    stage = "setpgid"
    try:
        os.setpgid(0, 0)
        leave_terminal()
        stage = "prctl"
        die_with_parent(signal.SIGKILL, parent=parent)
        stage = "dup2"
        os.dup2(stdio.stdin, 0)
        os.dup2(stdio.stdout, 1)
        os.dup2(stdio.stderr, 2)
        stage = "binding"
        apply_binding(spec.binding)
        stage = "limits"
        if inherited.descriptor_limit is not None:
            restore_fd_limit(inherited.descriptor_limit)
        stage = "signals"
        reset_dispositions()
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited.signal_mask)
        stage = "execve"
        os.execve(spec.path, spec.argv, spec.environ)
    except OSError as error:
        os.write(error_fd, f"{stage} {error.errno}".encode())
    finally:
        os._exit(127)
