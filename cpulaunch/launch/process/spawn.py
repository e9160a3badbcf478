"""One worker process made: its own group, bound, wired and executed, or the exact reason why not."""

from __future__ import annotations

import os
import signal

from cpulaunch.launch.output.routing import StdioFds
from cpulaunch.launch.process.bind import apply_binding
from cpulaunch.launch.process.descriptors import DescriptorLimit, fork_error, restore_fd_limit
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.process.program import exec_failure
from cpulaunch.launch.process.replace import default_dispositions
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import record
from cpulaunch.system.libc import die_with_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


@record
class Inherited:
    """What every worker gets as this launch got it: the signal mask, and the limit of open files if that was raised."""

    signal_mask: frozenset[int]
    descriptor_limit: DescriptorLimit | None = None


@record
class SpawnedWorker:
    """A worker's process (`pid` is its group too) and the pipe that says why it was not executed."""

    pid: int
    failure: int


def spawn(spec: ExecSpec, *, stdio: StdioFds, inherited: Inherited) -> SpawnedWorker:
    """The forked process; whether it was executed, `confirm_executed` tells. Raises: LaunchError."""
    read, write = os.pipe()  # Closed by a successful exec.
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        raise fork_error(error) from None
    if pid == 0:
        _become_worker(spec, stdio=stdio, inherited=inherited, parent=parent, failure=write)
    os.close(write)
    _make_group(pid)
    for fd in stdio.owned:
        os.close(fd)
    return SpawnedWorker(pid=pid, failure=read)


def _make_group(pid: int) -> None:
    """Effect: the child's group exists from here on. The child does it too: whoever comes first."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        return  # It has executed already, or ended.


def confirm_executed(spec: ExecSpec, started: SpawnedWorker) -> None:
    """Effect: waits until the worker's program runs. Raises: LaunchError or NotExecutableError if it never will."""
    with open(started.failure, "rb") as file:
        message = file.read().decode(errors="replace")
    if not message:
        return
    stage, _, code = message.partition(" ")
    if stage == "execve":
        raise exec_failure(spec.path, int(code))
    reason = os.strerror(int(code))
    raise LaunchError(
        f"worker {spec.worker} could not be started", value=stage, source=reason, hint="try --binder none"
    )


def _become_worker(spec: ExecSpec, *, stdio: StdioFds, inherited: Inherited, parent: int, failure: int) -> NoReturn:
    """Effect: this forked child is the worker, or has written "STAGE ERRNO" and ended."""
    stage = "setpgid"
    try:
        os.setpgid(0, 0)
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
        default_dispositions()
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited.signal_mask)
        stage = "execve"
        os.execve(spec.path, spec.argv, spec.environ)
    except OSError as error:
        os.write(failure, f"{stage} {error.errno}".encode())
    finally:
        os._exit(127)
