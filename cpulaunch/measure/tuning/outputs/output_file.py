"""The file that a program writes as its result, as outputs that can be compared within an error."""

from __future__ import annotations

import errno
import os
from hashlib import sha256

from cpulaunch.measure.tuning.outputs.printed_numbers import NUMBER, printed_numbers
from cpulaunch.system.files.reading import open_regular, read_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cpulaunch.measure.tuning.outputs.numerics import Outputs
    from cpulaunch.measure.tuning.outputs.printed_numbers import PrintedNumber

MAX_TEXT_BYTES = 1 << 24
"""A file of so many bytes or more is compared byte for byte."""
MAX_BYTES = 1 << 36
"""A larger file is not read, which takes minutes: a sparse one has any size."""
PIECE = 1 << 20
MOST_GROUPS = 1 << 16
"""The numbers of further groups are one group."""
PRINTED_TYPE = "float32"
"""Printed numbers are taken as results of fp32: what rounding makes of them is allowed."""


class OutputFile:
    """The file at a path: each launch has to write it anew."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._before: tuple[int, ...] | None = None

    def mark(self) -> None:
        """Effect: what is there now does not count as output of the next launch."""
        self._before = self._state()

    def outputs(self) -> Outputs | None:
        """The content as outputs; None if it has not been written since the mark, or cannot be read."""
        now = self._state()
        if now is None or now == self._before:
            return None
        try:
            return {self.path: _parts_of_file(os.path.realpath(self.path))}
        except OSError:
            return None

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _parts_of_file(path: str) -> list[dict[str, Any]]:
    """The parts of a file, of which a large one is read piece by piece. Raises: OSError."""
    fd = open_regular(path)
    try:
        data = read_from(fd, MAX_TEXT_BYTES)
        if len(data) < MAX_TEXT_BYTES:
            return file_parts(data)
        if os.fstat(fd).st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        digest, size = sha256(data), len(data)
        while piece := read_from(fd, PIECE):
            digest.update(piece)
            size += len(piece)
    finally:
        os.close(fd)
    return [{"place": "", "type": "bytes", "shape": [size], "digest": digest.hexdigest()}]


def file_parts(data: bytes) -> list[dict[str, Any]]:
    """The parts of a file: of text its numbers in groups, and the words around them; of others the digest of all bytes.

    A group is a key of JSON, a column of CSV, or a place in lines that are equal but for their numbers.
    """
    if not _is_text(data):
        return [{"place": "", "type": "bytes", "shape": [len(data)], "digest": _digest(data)}]
    words = NUMBER.sub("#", data.decode()).encode()
    groups: dict[str, list[PrintedNumber]] = {}
    for group, number in printed_numbers(data.decode()):
        known = len(groups) < MOST_GROUPS or group in groups
        groups.setdefault(group if known else "others", []).append(number)
    parts: list[dict[str, Any]] = [{"place": " (text)", "type": "str", "shape": [len(words)], "digest": _digest(words)}]
    for group, numbers in groups.items():
        parts.append({"place": f" ({group})", "type": PRINTED_TYPE, "shape": [len(numbers)], "numbers": numbers})
    return parts


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
