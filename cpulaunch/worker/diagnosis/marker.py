"""Which calls of a program end its steps. Pure."""

from __future__ import annotations

RANKS = {"optimizer": 3, "module": 2, "backward": 1, "loader": 0}
"""Kinds of calls that may end a step. One of a higher rank replaces one of a lower rank."""
FIRST = {"optimizer": 1, "module": 2, "backward": 2, "loader": 2}
"""How many calls make a key the end of steps: a module that is called once only prepares something."""
LOST = 16
"""Calls of another key of the same rank after which the steps end there."""
LOST_BELOW = 1000
"""Calls of lower rank after which the higher one is over, as an evaluation after a training."""
LOST_TIMES = 4
"""So many times as many other calls as between two of the key's own, and it is over."""
LEAST_SEEN = 3
"""Calls of a module after which it may replace one that is called more often and takes less time."""
MORE_CALLS, MORE_TIME = 2, 1.5


class _Calls:
    """The calls of a key and their seconds together, but for the first call, which prepares."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds if self.count else 0.0
        self.count += 1


class StepMarker:
    """Chooses one key, an optimizer or a module, whose calls end steps. `changes` counts its choices.

    A key that was left too early, and is called again after all, has longer steps than it seemed.
    """

    def __init__(self) -> None:
        self.kind = ""
        self.changes = 0
        self._key: object = None
        self._own = _Calls()
        self._others = self._most_others = self._total = 0
        self._left: dict[tuple[str, object], int] = {}
        self._seen: dict[tuple[str, object], _Calls] = {}

    def ends_step(self, kind: str, key: object, seconds: float = 0.0) -> bool:
        """Whether a step ends with this call, which took so long."""
        self._total += 1
        if kind == self.kind and key == self._key:
            self._own.add(seconds)
            self._most_others = max(self._most_others, self._others)
            self._others = 0
            return True
        seen = self._seen.setdefault((kind, key), _Calls())
        seen.add(seconds)
        if not self.kind or RANKS[kind] > RANKS[self.kind]:
            return seen.count >= FIRST[kind] and self._choose(kind, key, seen)
        self._others += 1
        limit = max(LOST if kind == self.kind else LOST_BELOW, LOST_TIMES * self._most_others)
        is_over = self._others >= limit and seen.count >= FIRST[kind]
        return (is_over or self._is_inside(kind, seen)) and self._choose(kind, key, seen)

    def _is_inside(self, kind: str, other: _Calls) -> bool:
        """Whether the chosen module only prepares what the other one gets, as for each sample of a batch."""
        return (
            kind == self.kind == "module"
            and other.count >= LEAST_SEEN
            and self._own.count >= MORE_CALLS * other.count
            and other.seconds > MORE_TIME * self._own.seconds
        )

    def _choose(self, kind: str, key: object, seen: _Calls) -> bool:
        is_inside = self._is_inside(kind, seen)
        self._left[self.kind, self._key] = self._total - self._others
        self._most_others = self._own.count // max(1, seen.count) if is_inside else 0
        if (kind, key) in self._left:
            self._most_others = max(self._most_others, self._total - self._left[kind, key])
        self.kind, self._key, self._own = kind, key, seen
        self.changes += 1
        self._others = 0
        self._seen = {}
        return True
