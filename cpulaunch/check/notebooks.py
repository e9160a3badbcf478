"""Notebooks: the code cells as one program, and the way back from its lines to cells and their lines."""

import json
import re
from typing import Any

from cpulaunch.records.record import record

MAGIC = re.compile(r"^\s*[%!?]|^\s*[\w, ]+=\s*[%!]|\?\s*$")


@record
class Notebook:
    """`text`: the program; `places`: for each of its lines the cell, from one among all cells, and the line there."""

    text: str
    places: tuple[tuple[int, int], ...]


def notebook(source: str) -> Notebook:
    """The program of a notebook; lines of IPython's own syntax are comments in it. Raises: ValueError."""
    document: Any = json.loads(source)
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook of version 4")
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    for number, cell in enumerate(cells, 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            for place, line in enumerate(_python(cell.get("source")), 1):
                lines.append(line)
                places.append((number, place))
    return Notebook(text="\n".join(lines) + "\n", places=tuple(places))


def _python(source: Any) -> list[str]:
    text = "".join(map(str, source)) if isinstance(source, list) else source if isinstance(source, str) else ""
    lines = text.split("\n")
    if text.lstrip().startswith("%%"):
        return ["#" for _ in lines]
    return [f"{line[: len(line) - len(line.lstrip())]}pass" if MAGIC.search(line) else line for line in lines]
