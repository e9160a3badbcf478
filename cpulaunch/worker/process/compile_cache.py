"""The folder of code that torch.compile has compiled: what is in it is loaded, so no other user may change it.

Any use of torch.compile reads it, `--graph onednn` with its own backend too: what a search for a defect of a compiler
has left there (torch/_inductor/compiler_bisector.py) replaces the backend, and is evaluated as Python.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from typing import Any

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.system.files.caches import user_cache
from cpulaunch.system.files.folders import make_secure_folder
from cpulaunch.system.files.trust import is_reachable
from cpulaunch.worker.reporting.degradation import warned

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
HEADERS = "precompiled_headers"
"""torch's folder of them. They take some 150 MB, and suit any number of threads."""

_held: list[int] = []
"""Descriptors of the folders that are locked."""


def install(settings: TorchSettings) -> str:
    """Effect: makes torch.compile keep its code in a private folder, unless the user named another one.

    Raises: RuntimeError if there is none, and a setting makes graphs. What the program itself compiles is in torch's
    folder then, after a warning. A folder of cpulaunch's, as the process that started this one had, is checked again.
    """
    inherited = os.environ.get(VARIABLE)
    if inherited is not None and _is_in_cache(inherited):
        del os.environ[VARIABLE]
    elif inherited not in (None, _default_of_torch()):
        return ""
    try:
        names = [settings.compile_cache] if settings.compile_cache else []
        folder = _private_folder(names, loads=settings.graph in ("inductor", "zentorch"))
    except RuntimeError as error:
        if settings.graph != "off":
            raise RuntimeError(f"{error}; --graph does nothing, as torch.compile makes its graphs") from None
        warned(settings, f"torch.compile keeps code in a folder that is not checked: {error}")
        return ""
    os.environ[VARIABLE] = folder
    return f"compiled code in {folder}"


def keep_headers(codecache: Any, settings: TorchSettings) -> None:
    """Effect: torch's module makes headers, from which it compiles, in the folder of its other code.

    Else they are in its default folder, whatever the variable says: what another user left there would be compiled.
    A torch that names that folder in another way makes none. Source: torch 2.13, torch/_inductor/codecache.py,
    _precompile_header.
    """
    if VARIABLE not in os.environ:
        return
    if not hasattr(codecache, "_HEADER_DIR"):
        if hasattr(codecache.config, "cpp_cache_precompile_headers"):
            codecache.config.cpp_cache_precompile_headers = False
    else:
        codecache._HEADER_DIR = os.path.join(_folder_of_headers(os.environ[VARIABLE], settings), HEADERS)
        codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")


def _folder_of_headers(folder: str, settings: TorchSettings) -> str:
    """The folder of all compiled code, or the whole cache where that is in the folder of a number of threads."""
    whole, name = os.path.split(folder)
    return whole if name == settings.compile_cache and whole in map(os.path.realpath, _caches()) else folder


def _private_folder(names: list[str], *, loads: bool) -> str:
    """This user's cache, or the one for temporary files where that cannot be used; in it, the folder of these names.

    Only cpulaunch makes these caches, and closed to others, whatever the modes of what torch makes in them: in one that
    others can enter, they may have changed code, or lock it. One mounted with noexec is the last choice, and none where
    the graphs are libraries, which torch `loads`. Raises: RuntimeError.
    """
    failures, unloadable = [], []
    for cache in _caches():
        try:
            whole = make_secure_folder(cache)
            _hold(whole)  # Before the check of what is in it, which looks at the whole way again.
            folder = make_secure_folder(os.path.join(whole, *names))
            if is_reachable(whole):
                failures.append(f"{whole} may be entered by other users")
            elif not os.access(folder, os.W_OK | os.X_OK):
                failures.append(f"{folder} is not writable")
            elif os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
                unloadable.append(folder)
                failures.append(f"{folder} is mounted with noexec: no library can be loaded from there")
            else:
                return folder
        except (OSError, ValueError) as error:
            reason, path = getattr(error, "strerror", None), getattr(error, "filename", None)
            failures.append(": ".join(filter(None, [path, reason])) or str(error))
    if unloadable and not loads:
        return unloadable[0]
    tried = "; ".join(failures) or "this user has no home folder"
    raise RuntimeError(f"no private folder for compiled code ({tried}); set {VARIABLE}")


def _hold(folder: str) -> None:
    """Effect: what removes old files passes over the folder while this process lives, or one that it has forked.

    Otherwise another user could make it again, under its name. Source: tmpfiles.d(5).
    """
    try:
        import fcntl  # The worker imports this module on systems without it too.

        _held.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        fcntl.flock(_held[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (ImportError, OSError):  # Not every file system has such locks.
        return


def _is_in_cache(folder: str) -> bool:
    """Whether it is one of the caches, or a folder in one, be it made by another user."""
    caches = [os.path.realpath(cache) for cache in _caches()]
    return any(os.path.realpath(each) in caches for each in (folder, os.path.dirname(folder)))


def _caches() -> list[str]:
    """This user's cache for this machine, and the one for temporary files, as far as there are such folders.

    A home may be shared by machines with other CPUs.
    """
    own = user_cache(f"inductor-{os.uname().nodename}", os.environ)
    temporary = _in_temporary(f"cpulaunch-inductor-{os.geteuid()}")
    return [path for path in (own, temporary) if path is not None and os.path.isabs(path)]


def _default_of_torch() -> str | None:
    """torch's folder, which torch itself writes to the variable, for what it starts; None without one.

    Source: torch 2.13, torch/_inductor/runtime/cache_dir_utils.py.
    """
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return _in_temporary(f"torchinductor_{name}")


def _in_temporary(name: str) -> str | None:
    """A path in the folder for temporary files; None without one."""
    try:
        return os.path.join(os.path.abspath(tempfile.gettempdir()), name)
    except OSError:
        return None
