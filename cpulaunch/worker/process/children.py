"""What programs started by the worker inherit: the worker's CPUs and the user's own LD_PRELOAD.

Fork hooks do not run for started programs: subprocess and multiprocessing's spawn go through
_posixsubprocess.fork_exec, which calls them only for a preexec_fn, or (subprocess since Python 3.13) os.posix_spawn.
Therefore the functions that start a program, or replace this process by one, are wrapped:

- An OpenMP runtime that pins threads leaves the calling thread on one CPU. While the program starts, the calling
  thread gets the worker's CPUs back, so that the program inherits them before its own OpenMP runtime reads its mask.
- The preloaded libraries were tested with this Python interpreter only. Other programs get the user's own LD_PRELOAD.
  Processes of this interpreter (multiprocessing's spawn, torchrun's ranks) get the worker's, because they do the
  worker's work and would run at another speed without the libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial, wraps
from importlib import import_module

from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import VARIABLE, TorchSettings
from cpulaunch.worker.process.pinning import worker_cpus, worker_mask

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

PRELOAD = "LD_PRELOAD"


@record(kw_only=False)
class Inheritance:
    """What started programs inherit.

    `cpus`: the worker's CPUs (empty: not bound). `worker_preload`: the worker's LD_PRELOAD (None: nothing to restore).
    `user_preload`: the user's LD_PRELOAD (None: not set).
    """

    cpus: frozenset[int]
    worker_preload: str | None
    user_preload: str | None


def install(settings: TorchSettings) -> str | None:
    """Effect: programs that this process starts get the worker's CPUs and the user's LD_PRELOAD."""
    preload = os.environ.get(PRELOAD) if settings.restore_preload else None
    inherited = Inheritance(worker_cpus(settings), preload, settings.ld_preload)
    if inherited.cpus or preload:
        _wrap_starts(inherited)
    if not settings.restore_preload:
        return None
    if settings.ld_preload is None:
        os.environ.pop(PRELOAD, None)
    else:
        os.environ[PRELOAD] = settings.ld_preload
    return f"programs started by the worker get LD_PRELOAD={settings.ld_preload or ''}"


def _wrap_starts(inherited: Inheritance) -> None:
    """Effect: wraps the functions that start programs. Raises: AttributeError if a future Python lacks one."""
    for module, name, wrapped in (
        (import_module("_posixsubprocess"), "fork_exec", partial(_fork_exec, inherited)),
        (subprocess, "_fork_exec", partial(_fork_exec, inherited)),
        (os, "posix_spawn", partial(_with_environ, inherited)),
        (os, "posix_spawnp", partial(_with_environ, inherited)),
        (os, "system", partial(_with_mask, inherited)),
        (os, "execv", partial(_exec, inherited, os.execve)),  # The other os.exec* call these two.
        (os, "execve", partial(_with_environ, inherited)),
    ):
        plain = getattr(module, name)
        setattr(module, name, wraps(plain)(_bind_original(wrapped, plain)))


def _bind_original(wrapped: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: wrapped(plain, *arguments, **named)


def _fork_exec(inherited: Inheritance, plain: Callable[..., int], *arguments: Any) -> int:
    """The child's process id.

    Source: _posixsubprocess.fork_exec(argv, executables, close_fds, pass_fds, cwd, env, …), Python 3.11 to 3.14.
    """
    argv, executables, close_fds, pass_fds, cwd, env, *rest = arguments
    if inherited.worker_preload and len(executables) == 1 and _is_this_python(executables[0]):
        variables = os.environb if env is None else dict(entry.partition(b"=")[::2] for entry in env)
        env = [name + b"=" + value for name, value in _with_preload(inherited, variables).items()]
    with worker_mask(inherited.cpus):
        return plain(argv, executables, close_fds, pass_fds, cwd, env, *rest)


def _with_environ(
    inherited: Inheritance, plain: Callable[..., Any], path: Any, argv: Any, env: Any = None, **named: Any
) -> Any:
    """The result of os.posix_spawn or os.execve(path, argv, env).

    `env` None stands for os.environ (posix_spawn since Python 3.13).
    """
    if inherited.worker_preload and _is_this_python(path):
        env = _with_preload(inherited, os.environb if env is None else _encoded(env))
    with worker_mask(inherited.cpus):
        return plain(path, argv, env, **named)


def _exec(
    inherited: Inheritance, execve: Callable[..., None], plain: Callable[..., None], path: Any, argv: Any
) -> None:
    """Effect: os.execv(path, argv), with the worker's LD_PRELOAD where the program is this interpreter."""
    if inherited.worker_preload and _is_this_python(path):
        _with_environ(inherited, execve, path, argv)
    with worker_mask(inherited.cpus):
        plain(path, argv)


def _with_mask(inherited: Inheritance, plain: Callable[..., int], *arguments: Any, **named: Any) -> int:
    with worker_mask(inherited.cpus):
        return plain(*arguments, **named)


def _is_this_python(path: object) -> bool:
    return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path) == sys.executable


def _encoded(env: Mapping[Any, Any]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in env.items()}


def _with_preload(inherited: Inheritance, variables: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """The variables with the worker's LD_PRELOAD, unless the program has changed LD_PRELOAD or cleared them."""
    key, user_preload = (
        os.fsencode(PRELOAD),
        None if inherited.user_preload is None else os.fsencode(inherited.user_preload),
    )
    if os.fsencode(VARIABLE) not in variables or variables.get(key) != user_preload:
        return variables
    return {**variables, key: os.fsencode(inherited.worker_preload or "")}
