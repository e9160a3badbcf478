"""A machine as an SVG picture of the same groups as the character map.

The picture follows the light or dark scheme of its reader and refers to nothing outside the file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import escaped
from cpulaunch.records.host import Host, count_text
from cpulaunch.view.machine_shape import DrawnCore, L3Group, NodeGroup, Owners, SocketGroup, machine_shape, node_title

PAGE, GAP, PADDING, TITLE = 1160, 8, 10, 20
CELL_WIDTH, LINE = 34, 14
DIGIT, HEADING_DIGIT = 7.2, 10.2
"""Widths of a character in pixels; the widest that the fonts in STYLE have."""
WORKER_HUES = (210, 28, 150, 280, 350, 90, 180, 50, 250, 320)
STYLE = """
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #1f2933 }
.page { fill: #ffffff } .heading { font-size: 17px; font-weight: 600 } .note, .title { fill: #52606d }
.socket { fill: #f4f6f8; stroke: #b8c2cc } .node { fill: #e6ebf0; stroke: #cbd2d9 } .l3 { fill: #d5dde5; stroke: none }
.core { fill: #ffffff; stroke: #9aa5b1 } .efficiency { fill: #dff1e4 } .outside { fill: none; stroke-dasharray: 3 2 }
.cell { font: 11px ui-monospace, monospace; text-anchor: middle } .strong { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } .page { fill: #12181f } .note, .title { fill: #9aa5b1 }
  .socket { fill: #1b232c; stroke: #3e4c59 } .node { fill: #232e39; stroke: #3e4c59 } .l3 { fill: #2d3a47 }
  .core { fill: #12181f; stroke: #616e7c } .efficiency { fill: #173a26 } .outside { fill: none }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """A drawing of known size whose corner is at 0,0."""

    width: float
    height: float
    parts: tuple[str, ...]

    def at(self, x: float, y: float) -> str:
        return f'<g transform="translate({x:g},{y:g})">{"".join(self.parts)}</g>'


def machine_svg(host: Host, owners: Owners | None = None) -> str:
    """The picture as an SVG document; with `owners` each core has its worker's colour and name."""
    return _picture(host, owners, style=STYLE)


def machine_drawing(host: Host, owners: Owners) -> str:
    """The picture as an element of a page, of class `machine`: the page's own style applies to it."""
    return _picture(host, owners, style=None)


def _picture(host: Host, owners: Owners | None, *, style: str | None) -> str:
    sockets = machine_shape(host, owners)
    cells = _Cells(sockets, with_owners=owners is not None)
    memory_only = [_panel("node", node_title(host, node), []) for node in host.numa_nodes if not node.cpus]
    boxes = [_socket(socket, cells) for socket in sockets]
    body = _flow([*boxes, *memory_only], width=PAGE, gap=12)
    notes = list(_notes(host, cells))
    height = 44 + body.height + 18 * len(notes) + 20
    width = max(body.width, len(_heading(host)) * HEADING_DIGIT, *(len(note) * DIGIT for note in notes)) + 32
    parts = [
        f'<rect class="page" width="{width:g}" height="{height:g}"/>',
        f'<text class="heading" x="16" y="28">{_xml(_heading(host))}</text>',
        body.at(16, 44),
        *(
            f'<text class="note" x="16" y="{44 + body.height + 20 + 18 * index:g}">{_xml(note)}</text>'
            for index, note in enumerate(notes)
        ),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img"{_class(style)}>'
        f"<title>{_xml(_heading(host))}</title>{_style(style)}{''.join(parts)}</svg>\n"
    )


def _class(style: str | None) -> str:
    return ' class="machine"' if style is None else ""


def _style(style: str | None) -> str:
    return "" if style is None else f"<style>{style}</style>"


def _xml(text: str) -> str:
    """The text as the content of an element: XML allows no control characters, not even as references."""
    return escape(escaped(text))


class _Cells:
    """How the cores of one picture are drawn: all of the same size."""

    def __init__(self, sockets: Iterable[SocketGroup], *, with_owners: bool) -> None:
        cores = [core for socket in sockets for node in socket.nodes for l3 in node.l3s for core in l3.cores]
        self.cores = cores
        self.with_owners = with_owners
        lines = [self._lines(core) for core in cores]
        self.width = max(CELL_WIDTH, *(len(line) * DIGIT + 10 for texts in lines for line in texts))
        self.height = max(len(texts) for texts in lines) * LINE + 8

    def draw(self, core: DrawnCore) -> _Box:
        """One core: its CPU ids, then its workers."""
        names = ["core", *(["efficiency"] if core.efficiency else []), *([] if core.usable else ["outside"])]
        fill = f' style="fill:{_color(core.owners[0])}"' if core.owners else ""
        texts = "".join(
            f'<text class="cell{" strong" if line.startswith("w") else ""}" x="{self.width / 2:g}" '
            f'y="{4 + LINE * (index + 0.8):g}">{_xml(line)}</text>'
            for index, line in enumerate(self._lines(core))
        )
        shape = f'<rect class="{" ".join(names)}"{fill} width="{self.width:g}" height="{self.height:g}" rx="4"/>'
        return _Box(width=self.width, height=self.height, parts=(shape, texts))

    def _lines(self, core: DrawnCore) -> list[str]:
        worker = "w" + "+".join(map(str, core.owners)) if core.owners else "·"
        return [*map(str, core.cpus), *([worker] if self.with_owners else [])]


def _color(worker: int) -> str:
    return f"hsl({WORKER_HUES[worker % len(WORKER_HUES)]} 70% 60% / 0.45)"


def _socket(socket: SocketGroup, cells: _Cells) -> _Box:
    return _panel("socket", socket.title, [_node(node, cells) for node in socket.nodes])


def _node(node: NodeGroup, cells: _Cells) -> _Box:
    return _panel("node", node.title, [_l3(l3, cells) for l3 in node.l3s])


def _l3(l3: L3Group, cells: _Cells) -> _Box:
    """An L3 with its cores in rows: about as many rows as columns, and at least eight columns."""
    columns = max(8, round(len(l3.cores) ** 0.5 * 1.5))
    width = columns * (cells.width + 4)
    return _panel("l3", l3.title, [cells.draw(core) for core in l3.cores], gap=4, width=width)


def _panel(kind: str, title: str, boxes: Sequence[_Box], *, gap: float = GAP, width: float = PAGE - 60) -> _Box:
    """A rectangle around boxes, with a title unless that is empty."""
    inner = _flow(boxes, width=width, gap=gap)
    top = PADDING + (TITLE if title else 0)
    shown = title if len(title) * DIGIT < PAGE - 80 else title[: int((PAGE - 80) / DIGIT)] + "…"
    wide = max(inner.width, len(shown) * DIGIT * 0.92) + 2 * PADDING
    high = top + inner.height + (PADDING if boxes else 0)
    parts = [f'<rect class="{kind}" width="{wide:g}" height="{high:g}" rx="8"/>']
    if title:
        parts.append(f'<text class="title" x="{PADDING}" y="{PADDING + 10}">{_xml(shown)}</text>')
    return _Box(width=wide, height=high, parts=(*parts, inner.at(PADDING, top)))


def _flow(boxes: Sequence[_Box], *, width: float, gap: float) -> _Box:
    """The boxes side by side as far as they fit in `width`, then below one another."""
    parts: list[str] = []
    x = y = row = widest = 0.0
    for box in boxes:
        if x and x + box.width > width:
            x, y, row = 0.0, y + row + gap, 0.0
        parts.append(box.at(x, y))
        widest = max(widest, x + box.width)
        x += box.width + gap
        row = max(row, box.height)
    return _Box(width=widest, height=y + row, parts=tuple(parts))


def _heading(host: Host) -> str:
    cores = len({cpu.core for cpu in host.cpus})
    name = host.cpu.model_name or host.arch
    return f"{name} · {count_text(cores, 'core')} · {count_text(len(host.cpus), 'logical CPU')}"


def _notes(host: Host, cells: _Cells) -> Iterable[str]:
    yield "Each small box is a core with its logical CPUs" + (" and its worker." if cells.with_owners else ".")
    if any(core.efficiency for core in cells.cores):
        yield "Green: efficiency cores."
    if not all(core.usable for core in cells.cores):
        yield f"Dashed: not available to this process ({host.limits.budget.limited_by})."
    if host.offline_cpus:
        yield f"Offline, not drawn: {format_cpulist(host.offline_cpus)}."
