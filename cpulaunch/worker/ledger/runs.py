"""Calls that are not measured, because the mode for them is chosen."""

from __future__ import annotations

from typing import Any


class UnmeasuredRun:
    """Calls of a module that run in a mode without being measured: those with its training mode and gradients.

    `left` is counted down by the wrapper of calls, which also ends the run at the time `until`; see module_calls.
    `chosen`: the signatures for which the mode is chosen; None if there is no other mode.
    """

    __slots__ = ("chosen", "left", "mode", "signature", "size", "until")

    def __init__(
        self, mode: str, size: int, signature: Any, *, until: float = float("inf"), chosen: frozenset[Any] | None = None
    ) -> None:
        self.mode = mode
        self.size = self.left = size
        self.signature = signature
        self.until = until
        self.chosen = chosen
