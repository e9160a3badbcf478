"""The numbers of a text, each with the group that it belongs to: a key of JSON, a column, or a place in a line.

Numbers of one group measure the same; those of two groups, such as a count and an accuracy, have nothing in common.
"""

from __future__ import annotations

import json
import math
import re
from hashlib import sha256

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TypeAlias

    PrintedNumber: TypeAlias = "int | float | str"

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])", re.ASCII)
SEPARATOR = re.compile("[,;\t]")
MOST_DIGITS = 1000
"""Longer numbers are compared as texts; Python converts at most 4300 digits."""
MOST_CHARACTERS = 200
"""Of a group's name: a text has many numbers in groups whose names begin alike."""


def printed_numbers(text: str) -> Iterator[tuple[str, PrintedNumber]]:
    """Each number of a text with its group. Numbers that no float holds are texts."""
    try:
        found: list[tuple[str, PrintedNumber]] = []
        _add_json(_parsed(text), "", found)
        yield from found
        return
    except (ValueError, RecursionError):
        pass
    for line in text.splitlines():
        yield from _in_line(line, "")


def _parsed(text: str) -> Any:
    """The JSON value in a text; of a text whose lines are JSON, a list. Raises: ValueError, RecursionError."""
    try:
        return _value(text)
    except ValueError:
        return [_value(line) for line in text.splitlines() if line.strip()]


def _value(text: str) -> Any:
    """A JSON value, its objects as tuples of pairs, so that a key that is there twice is kept twice."""
    return json.loads(text, object_pairs_hook=tuple, parse_int=_number, parse_float=_number, parse_constant=str)


def _add_json(value: Any, path: str, found: list[tuple[str, PrintedNumber]]) -> None:
    """Effect: adds the numbers of a JSON value."""
    if isinstance(value, tuple):
        for key, each in value:
            _add_json(each, _shortened(f"{path}[{key!r}]"), found)
    elif isinstance(value, list):
        path = _shortened(f"{path}[]")
        for each in value:
            _add_json(each, path, found)
    elif isinstance(value, str):
        for line in value.splitlines():
            found.extend(_in_line(line, path))
    elif value is not None and not isinstance(value, bool):
        found.append((path, value))


def _in_line(line: str, path: str) -> Iterator[tuple[str, PrintedNumber]]:
    """The numbers of a line. Of a line with separators the field is the group, else the words of the line."""
    fields = SEPARATOR.split(line)
    for number, field in enumerate(fields):
        named = f"column {number + 1} of {len(fields)}" if len(fields) > 1 else _shortened(NUMBER.sub("#", field))
        for place, found in enumerate(NUMBER.findall(field)):
            yield f"{path}{named}{f', {place + 1}' if place else ''}", _number(found)


def _shortened(name: str) -> str:
    """A name that is not long: of one that is, its start and its digest."""
    if len(name) <= MOST_CHARACTERS:
        return name
    return f"{name[:MOST_CHARACTERS]}... {sha256(name.encode(errors='surrogatepass')).hexdigest()}"


def _number(text: str) -> PrintedNumber:
    if len(text) > MOST_DIGITS:
        return text
    if text.lstrip("+-").isdigit():
        return int(text)
    return float(text) if math.isfinite(float(text)) else text
