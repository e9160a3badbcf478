"""What the profiler saw of the main thread, added up by kinds of operations. Pure: it takes events as tuples.

A top-level operation is one that the program, or an autograd node, calls. Its own time and the time since the one
before it, in Python or the autograd engine, belong together: many tiny operations cost mostly the latter.
"""

from __future__ import annotations

from collections import Counter

from cpulaunch.worker.diagnosis.events.chains import is_fusible, spared
from cpulaunch.worker.diagnosis.events.kinds import REGIONS, Event, is_container, kind_of, low_type
from cpulaunch.worker.diagnosis.events.moved_bytes import bytes_moved, elements
from cpulaunch.worker.diagnosis.events.spans import common, idle_common, length

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from cpulaunch.worker.diagnosis.events.spans import Span

TINY_NS = 20_000
"""A top-level operation that is shorter mostly costs what leads to it."""
TINY_FLOPS = 50_000
"""A product with less arithmetic takes microseconds; under the profiler, the operations inside it make it longer."""
PAUSE_NS = 200_000
"""A longer time between operations is spent in the program's own Python code, or waiting, and not in calling them."""
MOST_NAMES = 12
WAITS = ("data", "collective")
"""Regions whose time the hooks measure in all steps."""
MOST_TIMES, SLACK_NS = 2, 5_000
"""An operation that takes longer than this many times the usual, and so many ns, was interrupted."""
ACCESS_NODES = ("SelectBackward0", "SliceBackward0", "UnbindBackward0", "NarrowBackward0")
"""Nodes of autograd that make a whole gradient out of that of a part, and add it to those of the other parts."""
SLOWEST = 2.0
"""Arithmetic operations in a ns below which no product of fp32 matrices stays, but for its first microseconds."""
ELEMENT_NS, CALL_NS = 5, 15_000
"""What an operation takes at most for each element, in one thread, and besides: with 1,000 elements it is tiny."""
LEAST_MEMBERS = 3
"""Of a group in which something is usual."""


class _Open:
    """An event that has begun, and what is known of it when it ends. `kinds`: the own ns of operations inside it.

    `flops`: of the products in it. A sum of two biases says nothing of the whole that it is in.
    `of_access`: whether it is, or belongs to, one of ACCESS_NODES.
    """

    __slots__ = ("event", "flops", "gap", "inner", "is_operation", "kinds", "of_access", "region")

    def __init__(self, event: Event, region: str, above: _Open | None, *, is_operation: bool) -> None:
        self.event = event
        self.region = region
        self.of_access: bool = event.name.endswith(ACCESS_NODES) or (above is not None and above.of_access)
        self.is_operation = is_operation
        self.inner = 0
        self.gap = 0
        self.flops = 0.0
        self.kinds: dict[str, int] = {}

    @property
    def duration(self) -> int:
        return self.event.end - self.event.start


def add_up(events: Iterable[Event], start: int, end: int, *, disturbed: bool = False) -> dict[str, Any]:
    """The sums, in seconds unless named otherwise, of a window of the measured thread's time.

    Shape: {"seconds", "events": count, "kinds": {kind: own seconds, of operations that are not tiny}, "tiny": {…},
    "pauses": seconds of long times between operations, "overhead": of short ones, "absorbed": seconds by which
    operations took longer than others of their kind, which count as they usually take, "chained": of moving data, what
    fused kernels would save, "regions", "calls", "flops", "timed": seconds of the operations with flops, "low": seconds
    of products of low precision by type, "bytes": of element-wise operations, {bits of an operation's bytes: [bytes,
    seconds]}, "operations": [[name, count, seconds], …] longest first}.
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
        (each.start, each.end) for each in events if not each.name.startswith(REGIONS) and not is_container(each)
    ]
    return idle_common(passes, operations, collectives)


def communication(
    events: Sequence[Event], collectives: Iterable[Span], window: Span, backward_waits: float
) -> dict[str, float]:
    """Seconds of a window in which other threads run collectives, and of those in which the measured one computes.

    Shape: {"seconds", "hidden"}. `backward_waits`: as the function of that name has them.
    """
    running = common([window], collectives)
    calls = [(each.start, each.end) for each in events if each.name == "cpulaunch::collective"]
    seconds = length(running)
    return {"seconds": seconds, "hidden": max(0.0, seconds - length(common(running, calls)) - backward_waits)}


class _Walk:
    """Goes through the events in the order of their starts, with a stack of those that have not ended.

    `tops`: the top-level operations. `gaps`: the ns before each region, with its name, and at the end. `regions`: ns.
    `low`: ns of products of low precision by their type.
    """

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.tops: list[_Open] = []
        self.events = self.backward_nodes = 0
        self.gaps: list[tuple[str, int]] = []
        self.regions: dict[str, int] = {}
        self.flops: dict[str, list[float]] = {}
        self.low: dict[str, int] = {}
        self._last = start
        self._stack: list[_Open] = []

    def over(self, events: Iterable[Event]) -> None:
        """Effect: all events are counted."""
        for event in sorted(events, key=lambda each: (each.start, -each.end)):
            if event.start >= self.start and event.end <= self.end:
                self._close_until(event.start)
                self._open(event)
        self._close_until(self.end + 1)
        self.gaps.append(("", self._elapsed(self.end)))

    def _open(self, event: Event) -> None:
        above = self._stack[-1] if self._stack else None
        region = above.region if above else ""
        self.events += 1
        if event.name.startswith(REGIONS):
            self.gaps.append((event.name, self._elapsed(event.start)))
            region = event.name.removeprefix("cpulaunch::") if event.name.startswith("cpulaunch::") else "optimizer"
            self._stack.append(_Open(event, region, above, is_operation=False))
        elif is_container(event):
            is_backward = event.name.startswith("autograd::engine::")
            self.backward_nodes += is_backward
            self._stack.append(_Open(event, "backward" if is_backward else region, above, is_operation=False))
        else:
            opened = _Open(event, region, above, is_operation=True)
            if above is None or not above.is_operation:
                opened.gap = self._elapsed(event.start)
            self._stack.append(opened)

    def _elapsed(self, until: int) -> int:
        """The ns since the last operation; 0 while the thread waits for data or other ranks."""
        gap, self._last = max(0, until - self._last), max(self._last, until)
        return 0 if self._stack and self._stack[-1].region in WAITS else gap

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
        if kind == "low products":
            name = low_type(event)
            self.low[name] = self.low.get(name, 0) + own
        if event.flops:
            ended.flops += event.flops if kind in ("products", "low products") else 0.0
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


def _sums(walk: _Walk, *, disturbed: bool) -> dict[str, Any]:
    usual = _usual_durations(walk.tops, disturbed=disturbed)
    kinds: dict[str, float] = {}
    tiny = {"seconds": 0.0, "synchronization": 0.0, "outside": 0.0}
    calls: Counter[str] = Counter()
    names: dict[str, list[float]] = {}
    known_bytes: dict[str, list[float]] = {}
    usual_gaps = _usual_gaps(walk.gaps, disturbed=disturbed)
    pauses, overhead = (float(sum(each for each in usual_gaps if (each > PAUSE_NS) == long)) for long in (True, False))
    absorbed = sum(gap for _, gap in walk.gaps) - pauses - overhead
    large: list[tuple[str, float]] = []
    since_model = 0
    for top, (duration, gap) in zip(walk.tops, usual, strict=True):
        kind = kind_of(top.event)
        is_forward = top.region not in ("backward", "optimizer")
        is_outside = is_forward and top.region != "module"
        absorbed += top.duration + top.gap - duration - gap
        if gap > PAUSE_NS:
            pauses += gap
            gap = 0.0
        accesses = _accesses(top.event, kind)
        calls.update(all=1, forward=is_forward, outside=is_outside)
        calls.update(accesses=accesses * is_forward, outside_accesses=accesses * is_outside)
        if top.region == "backward":  # What came between the last model and the gradients is a loss.
            calls["loss"] += since_model
        since_model = since_model + 1 if is_outside else 0
        known = names.setdefault(top.event.name, [0, 0.0])
        known[0] += 1
        known[1] += duration * 1e-9
        if kind == "synchronization":
            calls["synchronization"] += 1
            tiny["synchronization"] += (duration + gap) * 1e-9
        elif duration < TINY_NS or (0 < top.flops < TINY_FLOPS and kind != "computing"):
            calls["tiny"] += 1
            tiny["seconds"] += (duration + gap) * 1e-9
            tiny["outside"] += (duration + gap) * 1e-9 * is_outside
        else:
            overhead += gap
            scale = duration / max(1, top.duration) * 1e-9
            large.append((top.event.name, duration * 1e-9))
            for each, value in _attributed(top).items():
                kinds[each] = kinds.get(each, 0.0) + value * scale
            if (moved := bytes_moved(top.event)) > 0:
                sums = known_bytes.setdefault(str(int(moved).bit_length()), [0.0, 0.0])
                sums[0] += moved
                sums[1] += duration * 1e-9
    ordered = sorted(names.items(), key=lambda item: -item[1][1])[:MOST_NAMES]
    return {
        "seconds": (walk.end - walk.start) * 1e-9,
        "events": walk.events,
        "kinds": kinds,
        "tiny": tiny,
        "pauses": pauses * 1e-9,
        "overhead": overhead * 1e-9,
        "absorbed": absorbed * 1e-9,
        "chained": spared(large),
        "regions": {name: value * 1e-9 for name, value in walk.regions.items()},
        "calls": {**calls, "backward": walk.backward_nodes},
        "flops": {kind: values[0] for kind, values in walk.flops.items()},
        "timed": {kind: values[1] * 1e-9 for kind, values in walk.flops.items()},
        "low": {name: value * 1e-9 for name, value in walk.low.items()},
        "bytes": known_bytes,
        "operations": [[name, int(count), seconds] for name, (count, seconds) in ordered],
    }


def _attributed(top: _Open) -> dict[str, int]:
    """The ns of an operation by kind.

    Conversions around a product of low precision belong to it, and to taking a part out of a tensor what it takes to
    put its gradient back.
    """
    if "low products" in top.kinds:
        return {"low products": sum(top.kinds.values())}
    return {"access": sum(top.kinds.values())} if top.of_access else top.kinds


def _usual_durations(tops: Sequence[_Open], *, disturbed: bool) -> list[tuple[float, float]]:
    """Duration of each operation and gap before it, at most MOST_TIMES what others of the same name and shapes take.

    If other threads `disturbed` this one, the shortest of a group is the usual one, an operation of known arithmetic
    is no slower than SLOWEST, one of each element no slower than ELEMENT_NS, and a pause before an operation that
    usually follows at once was an interruption.
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


def _usual_gaps(gaps: Sequence[tuple[str, int]], *, disturbed: bool) -> list[float]:
    """The time before each region; if other threads `disturbed` this one, at most MOST_TIMES the shortest such time."""
    groups: dict[str, list[int]] = {}
    for name, gap in gaps:
        groups.setdefault(name, []).append(gap)
    limits = {
        name: MOST_TIMES * min(found) + SLACK_NS if disturbed and len(found) >= LEAST_MEMBERS else float("inf")
        for name, found in groups.items()
    }
    return [min(gap, limits[name]) for name, gap in gaps]


def _limits(members: list[_Open], *, disturbed: bool) -> tuple[float, float]:
    """The longest duration and gap that count for operations of a group."""
    place = 0 if disturbed else len(members) // 2
    is_group = len(members) >= LEAST_MEMBERS
    duration, gap = (
        MOST_TIMES * sorted(values)[place] + SLACK_NS if is_group else float("inf")
        for values in ([each.duration for each in members], [each.gap for each in members])
    )
    count = elements(members[0].event) if disturbed and is_fusible(members[0].event.name) else None
    if count is not None:
        duration = min(duration, ELEMENT_NS * count + CALL_NS)
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
