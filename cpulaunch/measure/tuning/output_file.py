"""The file that a program writes as its result, as outputs that can be compared within an error."""

from __future__ import annotations

import os
import re

from cpulaunch.measure.tuning.identity import content_digest
from cpulaunch.system.files.reading import read_start
from cpulaunch.worker.reporting.checksums import checksum_parts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cpulaunch.measure.tuning.numerics import Outputs

MAX_TEXT_BYTES = 1 << 24
"""A larger file is compared byte for byte."""
MAX_BYTES = 1 << 33
NUMBER = re.compile(rb"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
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
            data = read_start(os.path.realpath(self.path), max_bytes=MAX_BYTES)
        except OSError:
            return None
        return {self.path: file_parts(data)}

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def file_parts(data: bytes) -> list[dict[str, Any]]:
    """The parts of a file: of text its numbers, and the words around them; of other files the digest of all bytes."""
    if len(data) > MAX_TEXT_BYTES or not _is_text(data):
        return [{"place": "", "type": "bytes", "shape": [len(data)], "digest": content_digest(data)}]
    numbers = [float(each) for each in NUMBER.findall(data)]
    words = NUMBER.sub(b"#", data)
    parts = [{"place": " (text)", "type": "str", "shape": [len(words)], "digest": content_digest(words)}]
    if numbers:
        (part,) = checksum_parts(numbers)
        parts.append({**part, "place": " (numbers)", "type": PRINTED_TYPE})
    return parts


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
