"""A machine drawn with characters: a box for each socket and L3, a number for each core."""

from collections.abc import Iterable, Mapping

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import Host
from cpulaunch.view.machine_shape import (
    DrawnCore,
    L3Group,
    NodeGroup,
    Owners,
    SocketGroup,
    machine_shape,
    node_title,
    sibling_step,
)

WORKER_COLORS = (36, 33, 35, 32, 34, 31)
DIM, EFFICIENCY_COLOR = 2, 34
FEW_CORES = 32
"""Up to this many cores all SMT siblings are written out; on larger machines a legend says how they are numbered."""

MARKS = {"l": "DataLoader workers of worker N", "c": "oneCCL threads of worker N"}


def machine_map(
    host: Host,
    *,
    width: int = 80,
    color: bool = False,
    owners: Owners | None = None,
    marks: Mapping[int, str] | None = None,
) -> str:
    """The map, at most `width` columns wide where the machine allows; with `owners` it shows the worker of each core.

    `marks`: logical CPUs on which a worker runs something else than its compute threads, each with a letter of MARKS.
    """
    sockets = machine_shape(host, owners)
    style = _Style(host, sockets, width=width, color=color, marks=None if owners is None else marks or {})
    lines = style.boxes(sockets)
    lines += [node_title(host, node) for node in host.numa_nodes if not node.cpus]
    return "\n".join([*lines, *style.legend(host)])


class _Style:
    """How cells are written on one map: what they show and how wide they are."""

    def __init__(
        self,
        host: Host,
        sockets: tuple[SocketGroup, ...],
        *,
        width: int,
        color: bool,
        marks: Mapping[int, str] | None,
    ) -> None:
        cores = [core for socket in sockets for node in socket.nodes for l3 in node.l3s for core in l3.cores]
        self.inside = max(20, width - 4)
        self.color = color
        self.with_owners = marks is not None
        self.marks = marks or {}
        self.step = sibling_step(host)
        self.all_siblings = self.step is None or len(cores) <= FEW_CORES
        self.cores = cores
        self.cell = max(len(text) for core in cores for text in self._texts(core))

    def boxes(self, sockets: tuple[SocketGroup, ...]) -> list[str]:
        """All sockets' boxes, equally wide, side by side where they fit."""
        inner = [
            self._flow([self._node(node) for node in socket.nodes], gap=3, width=self.inside) for socket in sockets
        ]
        width = max(len(sockets[-1].title) + 1, *(len(_plain(line)) for lines in inner for line in lines))
        frames = [
            _frame(socket.title, lines, width=width, corners="╭╮╰╯")
            for socket, lines in zip(sockets, inner, strict=True)
        ]
        return [line.rstrip() for line in self._flow(frames, gap=1, width=self.inside + 4)]

    def legend(self, host: Host) -> list[str]:
        """An explanation for each mark that occurs on the map."""
        lines = []
        if not self.all_siblings:
            lines.append(f"n: first CPU of a core; its SMT sibling is n+{self.step}")
        elif any(len(core.cpus) > 1 for core in self.cores):
            lines.append("a,b: SMT siblings of one core")
        if self.with_owners:
            marked = [f"    {letter}N: {text}" for letter, text in MARKS.items() if letter in self.marks.values()]
            lines.append(f"wN: worker N{''.join(marked)}    ·: no worker")
        if any(core.efficiency for core in self.cores):
            lines.append("e: efficiency core")
        if not all(core.usable for core in self.cores):
            lines.append("x: not available to this process")
        if host.offline_cpus:
            lines.append(f"offline CPUs (not drawn): {format_cpulist(host.offline_cpus)}")
        return lines

    def _node(self, node: NodeGroup) -> list[str]:
        choices = _column_choices(node.l3s)
        boxes = min(
            (self._flow([self._box(l3, columns) for l3 in node.l3s], gap=1, width=self.inside) for columns in choices),
            key=len,
        )
        title = node.title if len(node.title) <= self.inside else node.title[: self.inside - 1] + "…"
        return _block([title, *boxes] if title else boxes)

    def _flow(self, blocks: list[list[str]], *, gap: int, width: int) -> list[str]:
        """Blocks side by side as far as they fit, then below one another."""
        rows: list[list[list[str]]] = [[]]
        used = 0
        for block in blocks:
            size = len(_plain(block[0])) + gap
            if used and used + size - gap > width:
                rows.append([])
                used = 0
            rows[-1].append(block)
            used += size
        return _block([line for row in rows for line in _side_by_side(row, gap=gap)])

    def _box(self, l3: L3Group, columns: int) -> list[str]:
        """An L3's cores, at most `columns` a line."""
        fitting = max(1, min(columns, (self.inside - 3) // (self.cell + 1)))
        chunks = [l3.cores[at : at + fitting] for at in range(0, len(l3.cores), fitting)]
        rows = [" ".join(row) for chunk in chunks for row in zip(*map(self._paint, chunk), strict=True)]
        width = max(*(len(_plain(row)) for row in rows), len(l3.title) + 1 if l3.title else 0)
        return _frame(l3.title, rows, width=width, corners="┌┐└┘")

    def _texts(self, core: DrawnCore) -> list[str]:
        name = ",".join(map(str, core.cpus if self.all_siblings else core.cpus[:1]))
        marks = ("e" if core.efficiency else "") + ("" if core.usable else "x")
        letter = next((self.marks[cpu] for cpu in core.cpus if cpu in self.marks), "w")
        workers = letter + "+".join(map(str, core.owners)) if core.owners else "·"
        return [name + marks, workers] if self.with_owners else [name + marks]

    def _paint(self, core: DrawnCore) -> list[str]:
        code = None
        if core.owners:
            code = WORKER_COLORS[core.owners[0] % len(WORKER_COLORS)]
        elif not core.usable or self.with_owners:
            code = DIM
        elif core.efficiency:
            code = EFFICIENCY_COLOR
        cells = [text.rjust(self.cell) for text in self._texts(core)]
        return [f"\033[{code}m{cell}\033[0m" for cell in cells] if self.color and code is not None else cells


def _column_choices(l3s: tuple[L3Group, ...]) -> Iterable[int]:
    most = max(len(l3.cores) for l3 in l3s)
    return (most, *(columns for columns in (32, 16, 12, 8, 6, 4) if columns < most))


def _frame(title: str, lines: list[str], *, width: int, corners: str) -> list[str]:
    """The lines in a box with the title on its upper edge; `width` is that of the text inside."""
    head = f"─ {title} " if title else ""
    body = [f"│ {line}{' ' * (width - len(_plain(line)))} │" for line in lines]
    top, bottom = "─" * (width + 2 - len(head)), "─" * (width + 2)
    return [f"{corners[0]}{head}{top}{corners[1]}", *body, f"{corners[2]}{bottom}{corners[3]}"]


def _block(lines: list[str]) -> list[str]:
    """The lines, all as long as the longest."""
    width = max(len(_plain(line)) for line in lines)
    return [line + " " * (width - len(_plain(line))) for line in lines]


def _side_by_side(blocks: list[list[str]], *, gap: int) -> list[str]:
    height = max(len(block) for block in blocks)
    padded = [block + [" " * len(_plain(block[0]))] * (height - len(block)) for block in blocks]
    return [(" " * gap).join(parts) for parts in zip(*padded, strict=True)]


def _plain(text: str) -> str:
    """The text without escape sequences: as many characters as columns."""
    if "\033" not in text:
        return text
    return "".join(part.partition("m")[2] if index else part for index, part in enumerate(text.split("\033[")))
