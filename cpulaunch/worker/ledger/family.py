"""What modules of one class and shape share, as a program may make ever new ones: copies of a model, or candidates."""

from __future__ import annotations

from typing import Any

from torch import nn

from cpulaunch.worker.ledger.account import Account

FREE_MEMBERS = 4
"""Modules of a family whose first samples are free; those of later ones are paid for by all of them together."""


class ModuleFamily:
    """How many members there are, their common account, and what the last ones have found out.

    `choices`: the mode chosen last, for calls and for training steps. `ratios`: for both, how much longer each mode
    took than the chosen one.
    """

    __slots__ = ("account", "choices", "members", "ratios")

    def __init__(self) -> None:
        self.account = Account()
        self.members = 0
        self.choices: dict[bool, str] = {}
        self.ratios: dict[tuple[bool, str], float] = {}

    def join(self) -> bool:
        """Whether a new member pays for its samples. Effect: counts it."""
        self.members += 1
        return self.members > FREE_MEMBERS


class ModuleFamilies:
    """The families of all modules of a process."""

    def __init__(self) -> None:
        self._families: dict[int, ModuleFamily] = {}

    def of(self, module: nn.Module) -> ModuleFamily:
        """The family of a module; one of its own if its weights have no shapes yet, or cannot be read."""
        try:
            parts: list[Any] = [(each.shape, each.dtype) for each in module.parameters()]
        except Exception:  # noqa: BLE001  A class may override what is read here.
            return ModuleFamily()
        kind = type(module)
        return self._families.setdefault(hash((kind.__module__, kind.__qualname__, *parts)), ModuleFamily())
