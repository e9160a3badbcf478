"""The pages for users taken apart: headings, links, commands, and outputs that can be made again."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.json_output import schema
from tests.probe.captured import hwloc_machines, unpack

REPOSITORY = Path(__file__).parents[2]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
CAPTURED = "captured"
"""What pages call the folder of a captured machine: here MACHINE, two sockets with SMT."""
MACHINE = "32intel64-2p8co2t+8ve"
WIDTH = "90"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
CALL = re.compile(r"(?:^|\s)(?:cpulaunch|torchrun)(?= |$)")
FIELDS = re.compile(r"^<!-- schemas/([\w-]+)\.json -->\n.*?(?=\n## |\Z)", re.MULTILINE | re.DOTALL)
"""Where a page lists the fields of a schema: from the comment to the next heading."""
QUOTED = re.compile(r"^\$ (cpulaunch (?:.*\\\n)*.*)\n((?:(?!\$ |```).*\n)*)", re.MULTILINE)


def prose(text: str) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", text)


def anchors(text: str) -> frozenset[str]:
    """What `#...` may name: headings in lower case, without punctuation, spaces as dashes, repeated ones numbered."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def links(text: str) -> list[str]:
    """The targets of links within the repository."""
    targets = (one or other for one, other in LINK.findall(prose(text)))
    return [target for target in targets if "://" not in target]


def shown_commands(text: str) -> list[list[str]]:
    """The words of every call of cpulaunch that the page shows, in code blocks and in `code` that is a whole call."""
    blocks = (block.replace("\\\n", " ") for language, block in FENCE.findall(text) if not language)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    code = (" ".join(span.split()) for span in INLINE.findall(prose(text)))
    lines += [span for span in code if span.startswith("cpulaunch") and not re.search(r"\.\.\.|\[|\b[A-Z]+\b", span)]
    return [words for line in lines if (words := call_words(line))]


def call_words(line: str) -> list[str]:
    """The words of a call of cpulaunch, from its name on; none if the line is output or another program's call."""
    match = CALL.search(line)
    if match is None or not re.fullmatch(r"[\w=./ -]*", line[: match.start()]) or line.startswith("cpulaunch:"):
        return []
    words = shlex.split(line[match.start() :], comments=True)
    ends = [place for place, word in enumerate(words) if word in ("|", ">", "&")]
    return words[: min(ends, default=len(words))]


def refreshed(text: str, run: Callable[[str], str]) -> str:
    """The page with the output of every quoted command on the captured machine, and every schema's fields, of now."""

    def again(quoted: re.Match[str]) -> str:
        command, output = quoted.groups()
        return f"$ {command}\n{run(command) if '--sysroot' in command else output}"

    return FIELDS.sub(lambda place: schema_fields(place.group(1)), QUOTED.sub(again, text))


def schema_fields(name: str) -> str:
    """The comment that names a schema, its description with a link, and a list of its fields."""
    document = schema(name)
    title = f"{document['description']} Schema: [{name}](schemas/{name}.json)."
    lines = [f"<!-- schemas/{name}.json -->", "", *_paragraph(title), "", *_field_lines(document, indent=""), ""]
    return "\n".join(lines)


def _paragraph(text: str, *, head: str = "", indent: str = "") -> list[str]:
    return textwrap.wrap(text, 120, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def _field_lines(node: Any, *, indent: str) -> Iterator[str]:
    """A list item for each field of a schema's object, and below it those for the object in the field."""
    for name, described in node.get("properties", {}).items():
        if name == "schema":
            continue
        suffix, inner = _element(described)
        text = f"`{name}{suffix}`{_type_text(inner)}: {described['description']}"
        yield from _paragraph(text, head=f"{indent}- ", indent=f"{indent}  ")
        yield from _field_lines(inner, indent=f"{indent}  ")


def _element(node: Any) -> tuple[str, Any]:
    """The schema of the values in lists and under names that vary, with what stands for these in a path."""
    for key, step in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(node.get(key), dict) and "array" not in node["type"][1:]:
            suffix, inner = _element(node[key])
            return step + suffix, inner
    return "", node


def _type_text(node: Any) -> str:
    """The type of a value in brackets; nothing for an object, whose fields follow, and for one of another schema."""
    if "enum" in node:
        words = [json.dumps(word) for word in node["enum"]]
        return f" ({', '.join(f'`{word}`' for word in words)})"
    types = node.get("type", "object")
    return "" if types == "object" else f" ({types if isinstance(types, str) else ' or '.join(types)})"


def runner(folder: Path) -> Callable[[str], str]:
    """A function from a shell command to its stdout. Effect: the captured machine and `cpulaunch` are in `folder`."""
    machine = next(machine for machine in hwloc_machines() if machine["id"] == MACHINE)
    (folder / CAPTURED).symlink_to(unpack(machine, folder / "machines"))
    launcher = folder / "bin" / "cpulaunch"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cpulaunch "$@"\n')
    launcher.chmod(0o755)
    environ = {
        "PATH": f"{launcher.parent}:/usr/bin:/bin",
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "COLUMNS": WIDTH,
    }
    bash = ["bash", "-c"]
    return lambda command: (
        subprocess.run(
            [*bash, command], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, timeout=60, check=True
        ).stdout
    )


def write_all() -> Iterator[Path]:
    """The pages that changed. Effect: every quoted output is made again, and docs/machine-map.svg."""
    with tempfile.TemporaryDirectory() as folder:
        run = runner(Path(folder))
        for page in PAGES:
            text = page.read_text()
            if (new := refreshed(text, run)) != text:
                page.write_text(new)
                yield page
        drawn = map_svg(Path(folder), run)
        if drawn != MAP.read_text():
            MAP.write_text(drawn)
            yield MAP


MAP = REPOSITORY / "docs/machine-map.svg"
DRAWN = "64amd64-4s2n4ca2co"
"""The machine of the picture: four sockets, eight NUMA nodes, SMT siblings side by side."""


def map_svg(folder: Path, run: Callable[[str], str]) -> str:
    """The picture of the README as cpulaunch draws it now."""
    machine = next(machine for machine in hwloc_machines() if machine["id"] == DRAWN)
    root = unpack(machine, folder / "drawn")
    run(f"cpulaunch probe --sysroot {shlex.quote(str(root))} --svg map.svg")
    return (folder / "map.svg").read_text()


if __name__ == "__main__":
    for changed in write_all():
        print(os.path.relpath(changed))
