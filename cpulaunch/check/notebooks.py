"""Notebooks: the code cells as one program, and the way back from its lines to cells and their lines."""

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from cpulaunch.check.source.program import lines_of
from cpulaunch.records.record import record

MAGIC = re.compile(r"^\s*(?:[%!?]|(?=\S)[\w, ]+=\s*[%!])|^[^#'\"]*\?\s*$")
ASSIGNED_MAGIC = re.compile(r"^(\s*(?=\S)[\w, ]+=)\s*[%!]")  # Of many blanks, none is tried for both parts.
PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3")
"""Magics of a whole cell whose further lines are Python."""


@record
class Notebook:
    """`text`: the program; `places`: for each of its lines the cell, from one among all cells, and the line there.

    `unreadable`: for each cell that is not Python why, with its place; it is left out of the program.
    """

    text: str
    places: tuple[tuple[int, int], ...]
    unreadable: tuple[str, ...] = ()


def notebook(source: str) -> Notebook:
    """The program of a notebook; lines of IPython's own syntax do nothing in it. Raises: ValueError."""
    document: Any = json.loads(source)
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook of version 4")
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    unreadable: list[str] = []
    for number, cell in enumerate(cells, 1) if _is_python(document) else ():
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            try:
                code = _python(cell.get("source"))
            except SyntaxError as error:
                unreadable.append(f"cell {number}, line {error.lineno or 1}: {error.msg}")
                continue
            lines += code
            places += [(number, place) for place in range(1, len(code) + 1)]
    return Notebook(text="\n".join(lines) + "\n", places=tuple(places), unreadable=tuple(unreadable))


def _is_python(document: Any) -> bool:
    """Whether a notebook's language is Python: if it names none, it is."""
    metadata = document.get("metadata")
    for table, key in (("kernelspec", "language"), ("language_info", "name")):
        named = metadata.get(table) if isinstance(metadata, dict) else None
        language = named.get(key) if isinstance(named, dict) else None
        if isinstance(language, str) and language:
            return language.lower() in ("python", "ipython")
    return True


def _python(source: Any) -> list[str]:
    """A cell's lines as Python. Raises: SyntaxError."""
    text = "".join(map(str, source)) if isinstance(source, list) else source if isinstance(source, str) else ""
    lines = lines_of(text)
    if _parses(lines):
        return lines
    magic = "".join(text.split(maxsplit=1)[:1])
    if magic.startswith("%%") and magic not in PYTHON_CELLS:
        return ["#" for _ in lines]
    replaced = list(_without_magics(lines))
    ast.parse("\n".join(replaced))
    return replaced


def _parses(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


def _without_magics(lines: list[str]) -> Iterator[str]:
    """Lines of IPython's own syntax, with those that a backslash continues them on, as statements that do nothing."""
    is_continued = False
    for line in lines:
        is_magic = is_continued or MAGIC.search(line)
        assigned = ASSIGNED_MAGIC.match(line)
        if is_continued:
            yield "#"
        elif assigned:
            yield f"{assigned[1]} get_ipython()"
        elif is_magic:
            yield f"{line[: len(line) - len(line.lstrip())]}pass"
        else:
            yield line
        is_continued = bool(is_magic) and line.endswith("\\")
