"""The JSON that commands print, read as a program would, and checked against the published schemas.

Tests are stricter than the schemas: an object may have no field that its schema does not describe.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry, Resource

from cpulaunch.records.cpulist import parse_cpulist

SCHEMAS = Path(__file__).parents[1] / "docs/schemas"
FORMATS = FormatChecker(formats=())


@FORMATS.checks("id-list", raises=ValueError)
def is_id_list(value: object) -> bool:
    """Whether a text is a list such as "0-3,8"; what is no text is not the format's concern."""
    return not isinstance(value, str) or parse_cpulist(value) is not None


def schema(name: str) -> Any:
    """The schema in a file of docs/schemas."""
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def names() -> list[str]:
    """The names of all schemas."""
    return sorted(path.stem for path in SCHEMAS.glob("*.json"))


def read(name: str, text: str | bytes) -> Any:
    """The object in the text, which obeys the schema."""
    return checked(name, json.loads(text))


def read_messages(text: str) -> list[Any]:
    """The objects on stderr of a command with --json, one in each line."""
    return [read("message", line) for line in text.splitlines()]


def checked(name: str, value: Any) -> Any:
    """The object, which obeys the schema. Raises: jsonschema.ValidationError."""
    _validator(name).validate(value)
    return value


@cache
def _validator(name: str) -> Draft202012Validator:
    strict = [_strict(schema(each)) for each in names()]
    registry: Any = Registry().with_resources((each["$id"], Resource.from_contents(each)) for each in strict)
    return Draft202012Validator(strict[names().index(name)], registry=registry, format_checker=FORMATS)


def _strict(node: Any) -> Any:
    """The schema without fields that it does not describe."""
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _strict(value) for key, value in node.items()}
    return closed | {"additionalProperties": False} if isinstance(node.get("properties"), dict) else closed
