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


class StepMarker:
    """Chooses one key, an optimizer or a module, whose calls end steps. `changes` counts its choices."""

    def __init__(self) -> None:
        self.kind = ""
        self.changes = 0
        self._key: object = None
        self._others = 0
        self._seen: dict[tuple[str, object], int] = {}

    def ends_step(self, kind: str, key: object) -> bool:
        """Whether a step ends with this call."""
        if kind == self.kind and key == self._key:
            self._others = 0
            return True
        seen = self._seen[kind, key] = self._seen.get((kind, key), 0) + 1
        if not self.kind or RANKS[kind] > RANKS[self.kind]:
            return seen >= FIRST[kind] and self._choose(kind, key)
        self._others += 1
        limit = LOST if kind == self.kind else LOST_BELOW
        return self._others >= limit and seen >= FIRST[kind] and self._choose(kind, key)

    def _choose(self, kind: str, key: object) -> bool:
        self.kind, self._key = kind, key
        self.changes += 1
        self._others = 0
        self._seen.clear()
        return True
