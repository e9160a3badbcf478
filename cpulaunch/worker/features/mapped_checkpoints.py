"""torch.load memory-maps checkpoints: the page cache holds one copy for all instances and reads pages at first use."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import wraps

import torch

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.system.files.writing import replace_by_empty

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ZIP_MAGIC = b"PK\x03\x04"
"""First bytes of files of torch.save since 1.6; older files cannot be mapped. Source: torch.serialization."""

_mapped: set[tuple[int, int]] = set()
"""Device and inode of every file that torch.load has mapped."""


def install(settings: TorchSettings) -> str:
    """Effect: torch.load maps files unless the caller passes `mmap`; writing to a mapped file replaces the file."""
    load, save = _mapping(torch.serialization.load), _replacing_mapped(torch.serialization.save)
    torch.load = torch.serialization.load = load
    torch.save = torch.serialization.save = save
    return "torch.load memory-maps checkpoints"


def _mapping(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def load(f: Any, *arguments: Any, **named: Any) -> Any:
        if named.get("mmap") is not None or not _can_be_mapped(f):
            return plain(f, *arguments, **named)
        try:
            loaded = plain(f, *arguments, **{**named, "mmap": True})
        except Exception:  # noqa: BLE001 - the call without mmap shows what is wrong with the file
            return plain(f, *arguments, **named)
        _remember(f)
        return loaded

    return load


def _can_be_mapped(f: object) -> bool:
    """Whether this is the path of a checkpoint in the zip format."""
    if not isinstance(f, (str, os.PathLike)):
        return False
    try:
        with open(f, "rb") as file:
            return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    except (OSError, ValueError):
        return False  # torch.load reports the error.


def _replacing_mapped(plain: Callable[..., Any]) -> Callable[..., Any]:
    """torch.save that replaces a mapped file instead of truncating it."""

    @wraps(plain)
    def save(obj: object, f: Any, *arguments: Any, **named: Any) -> Any:
        _replace_if_mapped(f)
        return plain(obj, f, *arguments, **named)

    return save


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Effect: replaces a mapped file that Python code is about to truncate. Source: PEP 578, "open" of io.open.

    os.open is not covered, because its path may be relative to a directory descriptor.
    """
    if event != "open":
        return
    with suppress(Exception):  # An error here would make the program's open fail.
        path, mode, flags = arguments
        if isinstance(mode, str) and flags & os.O_TRUNC:
            _replace_if_mapped(path)


def _replace_if_mapped(f: object) -> None:
    """Effect: if the file is mapped, replaces it by an empty file with the same permissions and owner.

    Truncating a mapped file kills the process with SIGBUS. Source: mmap(2).
    """
    if not isinstance(f, (str, bytes, os.PathLike)) or (file := _identity(f)) not in _mapped:
        return
    with suppress(OSError):
        replace_by_empty(os.path.realpath(os.fsdecode(f)), file)


def _remember(f: Any) -> None:
    if identity := _identity(f):
        if not _mapped:
            sys.addaudithook(_audit)  # Not earlier: it runs at every audit event and cannot be removed.
        _mapped.add(identity)


def _identity(f: Any) -> tuple[int, int] | None:
    try:
        status = os.stat(f)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino
