"""What the profiler saw of the main thread, added up by kinds of operations. Pure: it takes events as tuples.

A top-level operation is one that the program, or an autograd node, calls. Its own time and the time since the one
before it, in Python or the autograd engine, belong together: many tiny operations cost mostly the latter.
"""

from __future__ import annotations

from collections import Counter

from cpulaunch.records.record import record
from cpulaunch.worker.diagnosis.spans import idle_common

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

TINY_NS = 20_000
"""A top-level operation that is shorter mostly costs what leads to it."""
TINY_FLOPS = 50_000
"""A product with less arithmetic takes microseconds; under the profiler, the operations inside it make it longer."""
PAUSE_NS = 200_000
"""A longer time between operations is spent in the program's own Python code, or waiting, and not in calling them."""
PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "addbmm", "_int_mm", "addmv", "mv", "dot", "matmul", "linear", "conv")
PRODUCT_WORDS = ("convolution", "mkldnn_linear", "_scaled_dot_product", "flash_attention", "lstm_layer", "rnn_layer")
PRODUCT_PREFIXES = ("quantized::linear", "quantized::conv", "onednn::", "mkldnn::", "mkldnn_prepacked::")
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "resize_", "new_empty", "new_empty_strided")
SYNCHRONIZATIONS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "tolist")
ACCESSES = ("select", "slice", "narrow", "index", "index_select", "take", "unbind", "select_backward", "slice_backward")
LOW_TYPES = ("c10::BFloat16", "c10::Half", "BFloat16", "Half")
ITEM_BYTES = {"double": 8, "float": 4, "long int": 8, "long": 8, "int": 4, "c10::BFloat16": 2, "c10::Half": 2}
REGIONS = ("cpulaunch::", "Optimizer.")
CONTAINERS = ("autograd::engine::", "Torch-Compiled Region", "DistributedDataParallel", "DataParallel", "enumerate(")
MOST_NAMES = 12
WAITS = ("data", "collective")
"""Regions whose time the hooks measure in all steps."""
MOST_TIMES, SLACK_NS = 2, 5_000
"""An operation that takes longer than this many times the usual, and so many ns, was interrupted."""
SLOWEST = 2.0
"""Arithmetic operations in a ns below which no product of fp32 matrices stays, but for its first microseconds."""
LEAST_MEMBERS = 3
"""Of a group in which something is usual."""


@record
class Event:
    """One event of the profiler's on the measured thread. Times in ns; `shapes` and `types` of its inputs."""

    name: str
    start: int
    end: int
    flops: float = 0.0
    shapes: Sequence[Sequence[int]] = ()
    types: Sequence[str] = ()


class _Open:
    """An event that has begun, and what is known of it when it ends. `kinds`: the own ns of operations inside it."""

    __slots__ = ("event", "flops", "gap", "inner", "is_operation", "kinds", "region")

    def __init__(self, event: Event, region: str, *, is_operation: bool) -> None:
        self.event = event
        self.region = region
        self.is_operation = is_operation
        self.inner = 0
        self.gap = 0
        self.flops = float(event.flops)
        self.kinds: dict[str, int] = {}

    @property
    def duration(self) -> int:
        return self.event.end - self.event.start


def kind_of(event: Event) -> str:
    """products, low products, allocation, synchronization, access, collective, or other (which moves data)."""
    family, _, name = event.name.rpartition("::")
    if family in ("c10d", "_c10d_functional") or event.name.startswith(("gloo:", "mpi:", "ccl:", "nccl:")):
        return "collective"
    if name in SYNCHRONIZATIONS:
        return "synchronization"
    if name in PRODUCTS or any(word in name for word in PRODUCT_WORDS) or event.name.startswith(PRODUCT_PREFIXES):
        return "low products" if any(each in LOW_TYPES for each in event.types) else "products"
    if name in ALLOCATIONS:
        return "allocation"
    return "access" if name in ACCESSES else "other"


def add_up(events: Iterable[Event], start: int, end: int, *, disturbed: bool = False) -> dict[str, Any]:
    """The sums, in seconds unless named otherwise, of a window of the measured thread's time.

    Shape: {"seconds", "events": count, "kinds": {kind: own seconds, of operations that are not tiny}, "tiny": {…},
    "pauses": seconds of long times between operations, "overhead": of short ones, "absorbed": seconds by which
    operations took longer than others of their kind, which count as they usually take, "regions", "calls", "flops",
    "timed": seconds of the operations with flops, "bytes", "operations": [[name, count, seconds], …] longest first}.
    `disturbed`: other threads often took the CPU, so that the shortest of equal operations are the usual ones.
    """
    walk = _Walk(start, end)
    walk.over(events)
    return _sums(walk, disturbed=disturbed)


def backward_waits(events: Sequence[Event], collectives: Iterable[tuple[int, int]]) -> float:
    """Seconds of backward passes in which other threads run collectives and the measured one no operation.

    DistributedDataParallel waits there, without a call that a hook could time. `collectives`: their spans in ns.
    """
    passes = [(each.start, each.end) for each in events if each.name == "cpulaunch::backward"]
    operations = [
        (each.start, each.end) for each in events if not each.name.startswith(REGIONS) and not _is_container(each)
    ]
    return idle_common(passes, operations, collectives)


class _Walk:
    """Goes through the events in the order of their starts, with a stack of those that have not ended.

    `tops`: the top-level operations. `pauses`, `regions`: ns.
    """

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.tops: list[_Open] = []
        self.events = self.backward_nodes = 0
        self.pauses = self.overhead = 0
        self.regions: dict[str, int] = {}
        self.flops: dict[str, list[float]] = {}
        self._last = start
        self._stack: list[_Open] = []

    def over(self, events: Iterable[Event]) -> None:
        """Effect: all events are counted."""
        for event in sorted(events, key=lambda each: (each.start, -each.end)):
            if event.start >= self.start and event.end <= self.end:
                self._close_until(event.start)
                self._open(event)
        self._close_until(self.end + 1)
        self.overhead += self._gap(self.end)

    def _open(self, event: Event) -> None:
        above = self._stack[-1] if self._stack else None
        region = above.region if above else ""
        self.events += 1
        if event.name.startswith(REGIONS):
            self.overhead += self._gap(event.start)
            region = event.name.removeprefix("cpulaunch::") if event.name.startswith("cpulaunch::") else "optimizer"
            self._stack.append(_Open(event, region, is_operation=False))
        elif _is_container(event):
            is_backward = event.name.startswith("autograd::engine::")
            self.backward_nodes += is_backward
            self._stack.append(_Open(event, "backward" if is_backward else region, is_operation=False))
        else:
            opened = _Open(event, region, is_operation=True)
            if above is None or not above.is_operation:
                opened.gap = self._elapsed(event.start)
            self._stack.append(opened)

    def _elapsed(self, until: int) -> int:
        """The ns since the last operation; 0 while the thread waits for data or other ranks."""
        gap, self._last = max(0, until - self._last), max(self._last, until)
        return 0 if self._stack and self._stack[-1].region in WAITS else gap

    def _gap(self, until: int) -> int:
        """The ns since the last operation, if they are short. Effect: a long time is a pause."""
        gap = self._elapsed(until)
        self.pauses += gap if gap > PAUSE_NS else 0
        return 0 if gap > PAUSE_NS else gap

    def _close_until(self, moment: int) -> None:
        while self._stack and self._stack[-1].event.end <= moment:
            self._close(self._stack.pop())

    def _close(self, ended: _Open) -> None:
        event, above = ended.event, self._stack[-1] if self._stack else None
        if not ended.is_operation:
            if event.name.startswith(REGIONS):
                self.regions[ended.region] = self.regions.get(ended.region, 0) + ended.duration
                if ended.region in WAITS:
                    self._last = max(self._last, event.end)
            return
        kind, own = kind_of(event), max(0, ended.duration - ended.inner)
        ended.kinds[kind] = ended.kinds.get(kind, 0) + own
        if event.flops:
            sums = self.flops.setdefault(kind, [0.0, 0.0])
            sums[0] += event.flops
            sums[1] += own
        if above is not None and above.is_operation:
            above.inner += ended.duration
            above.flops += ended.flops
            for name, value in ended.kinds.items():
                above.kinds[name] = above.kinds.get(name, 0) + value
            return
        self._last = max(self._last, event.end)
        if ended.region not in WAITS:
            self.tops.append(ended)


def _is_container(event: Event) -> bool:
    """Whether this is no operation but a node, a module or a region around operations."""
    return event.name.startswith(CONTAINERS) or ":" not in event.name


def _sums(walk: _Walk, *, disturbed: bool) -> dict[str, Any]:
    usual = _usual_durations(walk.tops, disturbed=disturbed)
    kinds: dict[str, float] = {}
    tiny = {"seconds": 0.0, "synchronization": 0.0, "outside": 0.0}
    calls: Counter[str] = Counter()
    names: dict[str, list[float]] = {}
    absorbed = moved = pauses = overhead = 0.0
    for top, (duration, gap) in zip(walk.tops, usual, strict=True):
        kind = kind_of(top.event)
        is_forward = top.region not in ("backward", "optimizer")
        is_outside = is_forward and top.region != "module"
        absorbed += top.duration + top.gap - duration - gap
        if gap > PAUSE_NS:
            pauses += gap
            gap = 0.0
        calls.update(all=1, forward=is_forward, outside=is_outside, accesses=_accesses(top.event, kind) * is_forward)
        known = names.setdefault(top.event.name, [0, 0.0])
        known[0] += 1
        known[1] += duration * 1e-9
        if kind == "synchronization":
            calls["synchronization"] += 1
            tiny["synchronization"] += (duration + gap) * 1e-9
        elif duration < TINY_NS or 0 < top.flops < TINY_FLOPS:
            calls["tiny"] += 1
            tiny["seconds"] += (duration + gap) * 1e-9
            tiny["outside"] += (duration + gap) * 1e-9 * is_outside
        else:
            overhead += gap
            scale = duration / max(1, top.duration) * 1e-9
            for each, value in _attributed(top.kinds).items():
                kinds[each] = kinds.get(each, 0.0) + value * scale
            moved += _bytes_moved(top.event) if kind == "other" else 0.0
    ordered = sorted(names.items(), key=lambda item: -item[1][1])[:MOST_NAMES]
    return {
        "seconds": (walk.end - walk.start) * 1e-9,
        "events": walk.events,
        "kinds": kinds,
        "tiny": tiny,
        "pauses": (walk.pauses + pauses) * 1e-9,
        "overhead": (walk.overhead + overhead) * 1e-9,
        "absorbed": absorbed * 1e-9,
        "regions": {name: value * 1e-9 for name, value in walk.regions.items()},
        "calls": {**calls, "backward": walk.backward_nodes},
        "flops": {kind: values[0] for kind, values in walk.flops.items()},
        "timed": {kind: values[1] * 1e-9 for kind, values in walk.flops.items()},
        "bytes": moved,
        "operations": [[name, int(count), seconds] for name, (count, seconds) in ordered],
    }


def _attributed(kinds: dict[str, int]) -> dict[str, int]:
    """The ns of an operation by kind; conversions around a product of low precision belong to it."""
    return {"low products": sum(kinds.values())} if "low products" in kinds else kinds


def _usual_durations(tops: Sequence[_Open], *, disturbed: bool) -> list[tuple[float, float]]:
    """Duration of each operation and gap before it, at most MOST_TIMES what others of the same name and shapes take.

    If other threads `disturbed` this one, the shortest of a group is the usual one, an operation of known arithmetic
    is no slower than SLOWEST, and a pause before an operation that usually follows at once was an interruption.
    """
    groups: dict[object, list[_Open]] = {}
    for top in tops:
        groups.setdefault(_key(top), []).append(top)
    limits = {key: _limits(members, disturbed=disturbed) for key, members in groups.items()}
    found = []
    for top in tops:
        of_duration, of_gap = limits[_key(top)]
        if top.gap > PAUSE_NS and not disturbed:
            of_gap = float("inf")
        found.append((min(top.duration, of_duration), min(top.gap, of_gap)))
    return found


def _limits(members: list[_Open], *, disturbed: bool) -> tuple[float, float]:
    """The longest duration and gap that count for operations of a group."""
    place = 0 if disturbed else len(members) // 2
    is_group = len(members) >= LEAST_MEMBERS
    duration, gap = (
        MOST_TIMES * sorted(values)[place] + SLACK_NS if is_group else float("inf")
        for values in ([each.duration for each in members], [each.gap for each in members])
    )
    if disturbed and members[0].flops and "low products" not in members[0].kinds:
        duration = min(duration, max(each.flops for each in members) / SLOWEST + 10 * SLACK_NS)
    return duration, gap


def _key(top: _Open) -> object:
    return top.event.name, top.region, tuple(map(tuple, top.event.shapes))


def _accesses(event: Event, kind: str) -> int:
    """How many parts of a tensor an operation takes out."""
    if kind != "access":
        return 0
    is_unbind = event.name == "aten::unbind" and event.shapes and event.shapes[0]
    return int(event.shapes[0][0]) if is_unbind else 1


def _bytes_moved(event: Event) -> float:
    """Bytes of the tensors that an operation reads, and as many as the largest that it writes; a lower bound."""
    sizes = []
    for shape, type_ in zip(event.shapes, event.types, strict=False):
        count = 1.0
        if not shape or not all(isinstance(each, int) for each in shape):
            continue
        for each in shape:
            count *= each
        sizes.append(count * ITEM_BYTES.get(type_, 4 if type_ else 0))
    return sum(sizes) + max(sizes, default=0.0)
