"""The folder of code that torch.compile has compiled: what is in it is loaded, so no other user may change it.

Any use of torch.compile reads it, `--graph onednn` with its own backend too: what a search for a defect of a compiler
has left there (torch/_inductor/compiler_bisector.py) replaces the backend, and is evaluated as Python.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import sys
import tempfile
from typing import Any

if sys.platform != "win32":
    import fcntl

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.system.files.caches import user_cache
from cpulaunch.system.files.folders import close_to_others, open_own, remove_path
from cpulaunch.system.files.reading import open_regular
from cpulaunch.system.files.trust import is_reachable, make_secure_folder
from cpulaunch.worker.reporting.degradation import warned

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
HEADERS = "precompiled_headers"
"""torch's folder of them. They take some 150 MB, and suit any number of threads."""


def install(settings: TorchSettings) -> str:
    """Effect: makes torch.compile keep its code in a private folder, unless the user named another one.

    Raises: RuntimeError if there is none, and a setting makes graphs. What the program itself compiles is in torch's
    folder then, after a warning.
    """
    if VARIABLE in os.environ and os.environ[VARIABLE] != _default_of_torch():
        return ""
    try:
        folder = _private_folder([settings.compile_cache] if settings.compile_cache else [])
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
    if name != settings.compile_cache:
        return folder
    try:
        return whole if whole in map(os.path.realpath, (_default(), _own_cache())) else folder
    except OSError:
        return folder


def _default_of_torch() -> str | None:
    """torch's folder, which torch itself writes to the variable, for what it starts; None without one."""
    try:
        return _default()
    except OSError:
        return None


def _private_folder(names: list[str]) -> str:
    """torch's default folder, or this user's cache where others can change that; in it, the folder of these names.

    A folder that others can read is the last choice: compiling waits while they lock files in it.
    """
    failures, readable = [], []
    for find in (_default, _own_cache):
        try:
            whole = make_secure_folder(find())
            folder = make_secure_folder(os.path.join(whole, *names))
            if not os.access(folder, os.W_OK | os.X_OK):
                failures.append(f"{folder} is not writable")
                continue
            if is_reachable(whole):
                _close_cache(whole, folder)
            if not is_reachable(folder):
                return folder
            readable.append(folder)
        except (OSError, ValueError) as error:
            reason, path = getattr(error, "strerror", None), getattr(error, "filename", None)
            failures.append(": ".join(filter(None, [path, reason])) or str(error))
    if readable:
        return readable[0]
    raise RuntimeError(f"no private folder for compiled code ({'; '.join(failures)}); set {VARIABLE}")


def _close_cache(whole: str, folder: str) -> None:
    """Effect: no other user can enter the whole of a cache, as torch makes it, unless one of its locks is held.

    The folders of its locks are removed, as others may have opened what is in them; torch makes them again.
    """
    locks = {os.path.join(each, *name, "locks") for each in (whole, folder) for name in ((), (HEADERS,))}
    if any(map(_has_held_lock, locks)):
        return
    opened = open_own(whole)
    try:
        if not close_to_others(opened):
            return
    finally:
        os.close(opened)
    for path in locks:
        remove_path(path)


def _has_held_lock(folder: str) -> bool:
    """Whether a process, of any user, holds a lock of a file in this folder, or that cannot be told."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(_is_held(os.path.join(folder, name)) for name in names)


def _is_held(path: str) -> bool:
    try:
        file = open_regular(path)
    except OSError as error:
        return error.errno != errno.ENOENT
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # Other ranks look at the same time.
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _default() -> str:
    """torch's folder. Raises: OSError, without a folder for temporary files.

    Source: torch 2.13, torch/_inductor/runtime/cache_dir_utils.py.
    """
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(os.path.abspath(tempfile.gettempdir()), f"torchinductor_{name}")


def _own_cache() -> str:
    """This user's cache for this machine: a home may be shared by machines with other CPUs. Raises: OSError."""
    path = user_cache(f"inductor-{os.uname().nodename}", os.environ)
    if not os.path.isabs(path):
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", path)
    return path
