"""torch.load that maps checkpoints: the page cache holds one copy for all instances, read when it is first used."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from functools import wraps

import torch

from cpulaunch.records.torch_settings import TorchSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ZIP_MAGIC = b"PK\x03\x04"
"""How files of torch.save begin since torch 1.6; older ones cannot be mapped. Source: torch.serialization."""

_mapped: set[tuple[int, int]] = set()
"""Device and inode of every file that was mapped."""


def install(settings: TorchSettings) -> str:
    """Effect: torch.load maps files where the caller has not said whether to; whoever writes them anew spares them."""
    load, save = _mapping(torch.serialization.load), _sparing(torch.serialization.save)
    torch.load = torch.serialization.load = load
    torch.save = torch.serialization.save = save
    return "torch.load maps checkpoints"


def _mapping(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def load(f: Any, *arguments: Any, **named: Any) -> Any:
        if named.get("mmap") is not None or not _can_be_mapped(f):
            return plain(f, *arguments, **named)
        try:
            loaded = plain(f, *arguments, **{**named, "mmap": True})
        except Exception:  # noqa: BLE001 - the plain call decides what is wrong with the file
            return plain(f, *arguments, **named)
        _remember(f)
        return loaded

    return load


def _can_be_mapped(f: object) -> bool:
    """Whether it is the path of a checkpoint in the zip format."""
    if not isinstance(f, (str, os.PathLike)):
        return False
    try:
        with open(f, "rb") as file:
            return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    except (OSError, ValueError):
        return False  # torch.load says why.


def _sparing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """torch.save that replaces a mapped file instead of emptying it."""

    @wraps(plain)
    def save(obj: object, f: Any, *arguments: Any, **named: Any) -> Any:
        _spare(f)
        return plain(obj, f, *arguments, **named)

    return save


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    """Effect: a mapped file that Python code is about to empty is replaced. Source: PEP 578, "open" of io.open.

    Not for os.open, whose path may be relative to another directory than ours.
    """
    if event != "open":
        return
    with suppress(Exception):  # It would keep the program from opening its file.
        path, mode, flags = arguments
        if isinstance(mode, str) and flags & os.O_TRUNC:
            _spare(path)


def _spare(f: object) -> None:
    """Effect: if this is a mapped file, an empty one with its permissions takes its name.

    A file emptied under its mapping ends the process with SIGBUS. Source: mmap(2).
    """
    if not isinstance(f, (str, bytes, os.PathLike)) or _identity(f) not in _mapped:
        return
    path = os.path.realpath(os.fsdecode(f))
    new = f"{path}.{os.getpid()}.new"
    with suppress(OSError):
        mode = stat.S_IMODE(os.stat(path).st_mode)
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.chmod(new, mode)
        os.replace(new, path)


def _remember(f: Any) -> None:
    if identity := _identity(f):
        if not _mapped:
            sys.addaudithook(_look)  # Not earlier: it is called often, and stays.
        _mapped.add(identity)


def _identity(f: Any) -> tuple[int, int] | None:
    try:
        status = os.stat(f)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino
