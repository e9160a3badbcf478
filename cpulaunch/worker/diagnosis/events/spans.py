"""Spans of time, (start, end) in ns, put together, taken apart and compared. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Span = tuple[int, int]


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not overlap, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Seconds that the spans cover, each moment once."""
    return sum(end - start for start, end in joined(spans)) * 1e-9


def common(first: Iterable[Span], second: Iterable[Span]) -> list[Span]:
    """The moments that are in spans of both."""
    left, right = joined(first), joined(second)
    found: list[Span] = []
    one = other = 0
    while one < len(left) and other < len(right):
        start, end = max(left[one][0], right[other][0]), min(left[one][1], right[other][1])
        if start < end:
            found.append((start, end))
        if left[one][1] < right[other][1]:
            one += 1
        else:
            other += 1
    return found


def idle_common(whole: Iterable[Span], busy: Iterable[Span], others: Iterable[Span]) -> float:
    """Seconds of the whole in which something of the others runs and nothing that is busy."""
    watched = common(whole, others)
    return length(watched) - length(common(watched, busy))
