"""What programs started by the worker inherit: the worker's CPUs, and a LD_PRELOAD that is not ours.

Fork hooks do not run for started programs: subprocess and multiprocessing's spawn go through
_posixsubprocess.fork_exec, which calls them only for a preexec_fn, or (subprocess since Python 3.13) os.posix_spawn.
So the functions that start programs, or put one in this one's place, are wrapped:

- An OpenMP runtime that pins leaves the calling thread on one CPU. For the moment of the start it gets the worker's
  CPUs back, and so does the program, before its own OpenMP runtime looks at its mask.
- The preloaded libraries were tried with this Python interpreter only. Other programs get the user's own LD_PRELOAD;
  those started as this interpreter (multiprocessing's spawn, torchrun's ranks) get the worker's, because they do the
  worker's work, and without the libraries they would do it at another speed.
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
    """The CPUs for started programs, the worker's own LD_PRELOAD (None: nothing to give), and the user's."""

    cpus: frozenset[int]
    preload: str | None
    users: str | None


def install(settings: TorchSettings) -> str | None:
    """Effect: programs that this process starts get the worker's CPUs, and LD_PRELOAD as the user had it."""
    preload = os.environ.get(PRELOAD) if settings.restore_preload else None
    left = Inheritance(worker_cpus(settings), preload, settings.ld_preload)
    if left.cpus or preload:
        _wrap_starts(left)
    if not settings.restore_preload:
        return None
    _give_back(settings.ld_preload)
    return f"other programs get LD_PRELOAD={settings.ld_preload or ''}"


def _give_back(users: str | None) -> None:
    if users is None:
        os.environ.pop(PRELOAD, None)
    else:
        os.environ[PRELOAD] = users


def _wrap_starts(left: Inheritance) -> None:
    """Raises: AttributeError if a future Python starts programs otherwise."""
    for module, name, wrapped in (
        (import_module("_posixsubprocess"), "fork_exec", partial(_fork_exec, left)),
        (subprocess, "_fork_exec", partial(_fork_exec, left)),
        (os, "posix_spawn", partial(_with_environ, left)),
        (os, "posix_spawnp", partial(_with_environ, left)),
        (os, "system", partial(_with_mask, left)),
        (os, "execv", partial(_exec, left, os.execve)),  # All others of os call these two.
        (os, "execve", partial(_with_environ, left)),
    ):
        plain = getattr(module, name)
        setattr(module, name, wraps(plain)(_around(wrapped, plain)))


def _around(wrapped: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: wrapped(plain, *arguments, **named)


def _fork_exec(left: Inheritance, plain: Callable[..., int], *arguments: Any) -> int:
    """Source: _posixsubprocess.fork_exec(argv, executables, close_fds, pass_fds, cwd, env, …), Python 3.11 to 3.14."""
    argv, executables, close, kept, cwd, env, *rest = arguments
    if left.preload and len(executables) == 1 and _is_this_python(executables[0]):
        variables = os.environb if env is None else dict(entry.partition(b"=")[::2] for entry in env)
        env = [name + b"=" + value for name, value in _with_preload(left, variables).items()]
    with worker_mask(left.cpus):
        return plain(argv, executables, close, kept, cwd, env, *rest)


def _with_environ(
    left: Inheritance, plain: Callable[..., Any], path: Any, argv: Any, env: Any = None, **named: Any
) -> Any:
    """Source: os.posix_spawn and os.execve(path, argv, env); None: this process's, for posix_spawn since 3.13."""
    if left.preload and _is_this_python(path):
        env = _with_preload(left, os.environb if env is None else _encoded(env))
    with worker_mask(left.cpus):
        return plain(path, argv, env, **named)


def _exec(left: Inheritance, execve: Callable[..., None], plain: Callable[..., None], path: Any, argv: Any) -> None:
    """Source: os.execv(path, argv)."""
    if left.preload and _is_this_python(path):
        _with_environ(left, execve, path, argv)
    with worker_mask(left.cpus):
        plain(path, argv)


def _with_mask(left: Inheritance, plain: Callable[..., int], *arguments: Any, **named: Any) -> int:
    with worker_mask(left.cpus):
        return plain(*arguments, **named)


def _is_this_python(path: object) -> bool:
    return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path) == sys.executable


def _encoded(env: Mapping[Any, Any]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in env.items()}


def _with_preload(left: Inheritance, variables: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """The variables with the worker's LD_PRELOAD, where the program has not made an environment of its own."""
    key, users = os.fsencode(PRELOAD), None if left.users is None else os.fsencode(left.users)
    if os.fsencode(VARIABLE) not in variables or variables.get(key) != users:
        return variables
    return {**variables, key: os.fsencode(left.preload or "")}
