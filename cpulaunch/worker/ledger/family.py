"""What modules of one class and shape share, as a program may make ever new ones: copies of a model, or candidates."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from cpulaunch.worker.ledger.account import Account

FREE_MEMBERS = 4
"""Modules of a family whose first samples are free; those of later ones are paid for by all of them together."""

MAX_SIGNATURES, MAX_FAMILIES = 64, 256
"""Signatures of which a family knows something, and families of which anything is known; the oldest are forgotten."""


class ModuleFamily:
    """The common account of its members, and what they have found out so far.

    `choices`: the mode chosen last, by signature. `ratios`: how much longer each mode took than the chosen one, for
    calls and for training steps. `unfinished`: decisions without a choice yet, of modules that are gone.
    """

    __slots__ = ("account", "choices", "members", "ratios", "unfinished")

    def __init__(self) -> None:
        self.account = Account()
        self.members = 0
        self.choices: dict[Hashable, str] = {}
        self.ratios: dict[tuple[bool, str], float] = {}
        self.unfinished: dict[Hashable, Any] = {}

    def join(self) -> bool:
        """Whether a new member pays for samples of signatures that others know. Effect: counts it."""
        self.members += 1
        return self.members > FREE_MEMBERS

    def learn(self, signature: Hashable, mode: str) -> None:
        """Effect: the mode is chosen for the signature."""
        self.choices[signature] = mode
        _forget_oldest(self.choices, MAX_SIGNATURES)

    def leave(self, decisions: dict[Hashable, Any]) -> None:
        """Effect: the next member goes on with the decisions of one that is gone, which have not come to a choice."""
        for signature, decision in decisions.items():
            if decision.chosen is None:
                self.unfinished[signature, decision.modes] = decision
                _forget_oldest(self.unfinished, MAX_SIGNATURES)


def _forget_oldest(known: dict[Any, Any], most: int) -> None:
    while len(known) > most:
        known.pop(next(iter(known)), None)


class ModuleFamilies:
    """The families of all modules of a process."""

    def __init__(self) -> None:
        self._families: dict[int, ModuleFamily] = {}

    def of(self, module: nn.Module) -> ModuleFamily:
        """The family of a module; one of its own if its weights have no shapes yet, or cannot be read."""
        try:
            with torch._C.DisableTorchFunction():  # The program's function modes do not see what is read here.
                parts: list[Any] = [(each.shape, each.dtype) for each in module.parameters()]
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # As Signatures: it may be overridden.
            return ModuleFamily()
        kind = type(module)
        family = self._families.setdefault(hash((kind.__module__, kind.__qualname__, *parts)), ModuleFamily())
        _forget_oldest(self._families, MAX_FAMILIES)
        return family
