"""The ledger of one module: a decision for each signature, one account for all of them, and what its calls need."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from contextlib import suppress
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from cpulaunch.worker.ledger.account import Account
from cpulaunch.worker.ledger.blocks import BlockDecision
from cpulaunch.worker.ledger.decision import PLAIN, Decision
from cpulaunch.worker.ledger.family import ModuleFamily
from cpulaunch.worker.ledger.runs import FIRST_RUN, FIRST_SLACK, Turn
from cpulaunch.worker.ledger.signature import Signatures

if TYPE_CHECKING:
    from torch import nn

MAX_SIGNATURES = 64
"""Signatures with a decision of their own; of more, any one is forgotten.

The least recently used one would be the next one to be called in a program that takes its shapes in turn.
"""

_numbers = Random(0)
"""Apart from the random numbers of the program."""

UNDECIDED_SHARE = 0.5
"""A mode is of no use to a module once no signature has chosen it and undecided ones take less than this share."""

MINOR_SHARE = 0.1
"""Undecided signatures with less than this share of a module's measured time do not keep the others from being measured
less. Of calls that were not measured, it is unknown which signature they had."""

RECENT_SECONDS = 10.0
"""After so many seconds of a module's calls without one of a signature, the signature is not expected again."""

OTHER_PLACE_SECONDS = 10.0
"""Seconds for which plain calls of a module are looked at because calls in another place have had a choice of modes."""

MAX_PARTS = 1000
"""Modules in one module that are counted."""

Flags = tuple[bool, bool, tuple[str, bool]]
"""Whether the module is in training mode, and gradients are enabled; and the module's place."""

AnyDecision = Decision | BlockDecision


class ModuleLedger:
    """Decides by durations alone; the caller measures them.

    Two runs of a program may choose different modes, and results differ between modes by the rounding of the type that
    the user has chosen (fp32, or bf16 or fp16 where the settings allow it). A choice stays until a later trial.
    """

    def __init__(self) -> None:
        self.family = ModuleFamily()
        self._pays = False
        self.account = Account()
        self.decisions: dict[Hashable, AnyDecision] = {}
        self._seconds: dict[Hashable, float] = {}
        self._measured: dict[Hashable, float] = {}
        self._used: dict[Hashable, float] = {}
        self._removed: set[str] = set()
        self._once: dict[Hashable, tuple[str, ...]] = {}
        """Signatures called once so far, with the modes possible: those after the first one are sampled from their
        second call on."""

    def join(self, family: ModuleFamily, *, like: ModuleLedger | None = None) -> None:
        """Effect: the module is a member of its family, or remains one as by another ledger of its own."""
        self.family = family
        self._pays = family.join() if like is None else like._pays

    def next(self, signature: Hashable, modes: tuple[str, ...], *, in_blocks: bool = False, ranks: int = 1) -> str:
        """The mode of the next call of this signature. `modes`: those possible, the one expected to be best first.

        `ranks`: how many processes wait for one another: what a trial costs one of them, it costs all.
        """
        account = self.family.account if self._pays else self.account
        return self._decision(signature, modes, in_blocks).next(account.credit(ranks))

    def postpone(self, signature: Hashable, mode: str, seconds: float) -> None:
        """Effect: the mode is tried for the signature later, because it is being prepared elsewhere. Counts a call."""
        self.account.add(seconds)
        decision = self.decisions.get(signature)
        if decision is not None:
            decision.postpone(mode, seconds)

    def add(self, signature: Hashable, mode: str, seconds: float, *, steady: bool = True) -> bool:
        """Whether the choice for the signature has changed. Effect: counts a call and its duration, in seconds."""
        decision = self.decisions.get(signature)
        if decision is None:
            return False
        chosen = decision.chosen
        excess = 0.0
        if chosen is not None and mode != chosen and decision.estimate(chosen) < float("inf"):
            excess = seconds - decision.estimate(chosen)
        self.account.add(seconds, excess=excess)
        self.family.account.add(seconds, excess=excess)
        self._seconds[signature] = self._seconds.get(signature, 0.0) + seconds
        self._measured[signature] = self._measured.get(signature, 0.0) + seconds
        self._used[signature] = self.account.total
        inner = decision.decision if isinstance(decision, BlockDecision) else decision
        was_sampling = inner.is_sampling
        has_changed = decision.add(mode, seconds, steady=steady)
        if was_sampling and not inner.is_sampling:
            self._teach(signature, inner, in_blocks=inner is not decision)
        return has_changed

    def _teach(self, signature: Hashable, decision: Decision, *, in_blocks: bool) -> None:
        """Effect: the family knows what has been found out by samples of several modes."""
        chosen = decision.chosen or PLAIN
        known = {mode: seconds for mode in decision.modes if (seconds := decision.estimate(mode)) < float("inf")}
        if len(known) > 1 and known.get(chosen):
            self.family.learn(signature, chosen)
            self.family.ratios.update({(in_blocks, mode): seconds / known[chosen] for mode, seconds in known.items()})

    def skip(self, signature: Hashable, calls: int) -> None:
        """Effect: counts calls in the chosen mode that were not measured, at its typical duration."""
        decision = self.decisions.get(signature)
        if decision is None or decision.chosen is None or calls <= 0:
            return
        decision.skip(calls)
        typical = decision.estimate(decision.chosen)
        if typical < float("inf"):
            self.account.add(calls * typical)
            self.family.account.add(calls * typical)
            self._seconds[signature] = self._seconds.get(signature, 0.0) + calls * typical
            self._used[signature] = self.account.total

    def recent(self) -> list[Hashable]:
        """The signatures of recent calls."""
        since = self.account.total - RECENT_SECONDS
        return [signature for signature in self.decisions if self._used.get(signature, 0.0) >= since]

    def fastest_but(self, mode: str, signature: Hashable) -> str | None:
        """As Chooser.fastest_but, for one signature."""
        decision = self.decisions.get(signature)
        if decision is None:
            return None
        return min((PLAIN, *(each for each in decision.modes if each != mode)), key=decision.estimate)

    def remove(self, mode: str) -> None:
        """Effect: no signature uses the mode any more."""
        self._removed.add(mode)
        for decision in self.decisions.values():
            decision.remove(mode)

    def is_useless(self, mode: str) -> bool:
        """Whether the mode has lost for every signature that matters; see Decision.has_lost."""
        users = [each for each in self.decisions.values() if mode in each.modes]
        decided = [each for each in users if each.chosen is not None]
        if not decided or not all(each.has_lost(mode, seconds=self.account.total) for each in decided):
            return False
        undecided = sum(
            self._seconds.get(signature, 0.0)
            for signature, each in self.decisions.items()
            if each.chosen is None and mode in each.modes
        )
        return undecided < UNDECIDED_SHARE * self.account.total

    def has_decided(self, signatures: Iterable[Hashable]) -> bool:
        """Whether modes are chosen for all of these signatures; undecided ones may take MINOR_SHARE."""
        undecided = 0.0
        for signature in signatures:
            decision = self.decisions.get(signature)
            if decision is None:
                continue
            modes = self._once.get(signature)  # Not those of the decision, which lacks removed ones.
            is_new = modes is not None and self.account.has_start_up(modes)
            if decision.chosen is None or decision.is_sampling or is_new:
                undecided += self._measured.get(signature, 0.0)
        return undecided <= MINOR_SHARE * sum(self._measured.values())

    def _decision(self, signature: Hashable, modes: tuple[str, ...], in_blocks: bool) -> AnyDecision:
        decision = self.decisions.get(signature)
        left = tuple(mode for mode in modes if mode not in self._removed) or (PLAIN,)
        kind = BlockDecision if in_blocks else Decision
        if decision is not None:
            if signature in self._once:
                del self._once[signature]
                if self.account.start_up(modes):
                    decision = self.decisions[signature] = kind(left, ratio=lambda mode: self._ratio(mode, kind))
            return decision
        prior = self.family.choices.get(signature) if self._pays else None
        if prior is not None:
            prior = prior if prior in left else PLAIN
        elif not self.account.is_first(modes):
            self._once[signature] = modes
            prior = self._prior(left, in_blocks)
        else:
            self.account.start_up(modes)
            decision = self.family.unfinished.pop((signature, left), None)
        decision = decision or kind(left, prior=prior, ratio=lambda mode: self._ratio(mode, kind))
        self.decisions[signature] = decision
        if len(self.decisions) > MAX_SIGNATURES:
            forgotten = _numbers.choice(list(self.decisions)[:-1])
            del self.decisions[forgotten]
            self._seconds.pop(forgotten, None)
            self._measured.pop(forgotten, None)
            self._used.pop(forgotten, None)
            self._once.pop(forgotten, None)
        return decision

    def _prior(self, modes: tuple[str, ...], in_blocks: bool) -> str:
        """The mode that other such signatures have chosen for most of their time; plain if none has."""
        seconds: dict[str, float] = {}
        for signature, each in self.decisions.items():
            if each.chosen in modes and isinstance(each, BlockDecision) is in_blocks:
                mode = each.chosen or PLAIN
                seconds[mode] = seconds.get(mode, 0.0) + self._seconds.get(signature, 0.0)
        return max(seconds, key=lambda mode: seconds[mode], default=PLAIN)

    def _ratio(self, mode: str, kind: type) -> float:
        """The smallest ratio of the mode's duration to the chosen one's, over signatures that have both; 0 if none."""
        ratios = [
            decision.estimate(mode) / own
            for decision in self.decisions.values()
            if isinstance(decision, kind) and 0 < (own := decision.estimate(decision.chosen or "")) < float("inf")
        ]
        known = self.family.ratios.get((kind is BlockDecision, mode), 0.0)
        return min((ratio for ratio in ratios if ratio < float("inf")), default=known)


class ModuleEntry:
    """One module: its ledger, the modes possible by flags, and the training step in progress."""

    __slots__ = (
        *("address", "called", "has_failed", "has_family", "ledger", "modes", "module", "name", "other_slack"),
        *("_parts", "reports", "retry", "run_size", "signatures", "slack", "step", "to_measure"),
    )

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.address = id(module)
        self.name = type(module).__name__
        self.ledger = ModuleLedger()
        self.has_family = False
        self.signatures = Signatures()
        self.modes: dict[Flags, tuple[str, ...]] = {}
        self.called: dict[Flags, float] = {}
        self.step: tuple[Turn, float] | None = None
        self.has_failed = False
        self.retry = 0.0
        self.run_size = FIRST_RUN
        self.slack = self.other_slack = FIRST_SLACK
        self.to_measure = 0
        self.reports = 0
        self._parts = 0

    def parts(self) -> int:
        """The number of modules of which this one consists, itself included; MAX_PARTS if there are more."""
        module = self.module()
        if not self._parts and module is not None:
            self._parts = 1
            with suppress(Exception):  # A class may override it.
                self._parts = sum(1 for _ in islice(module.modules(), MAX_PARTS))
        return self._parts

    def has_others(self, flags: Flags, now: float) -> bool:
        """Whether the module, on the same device, is also called in a place where it has a choice of modes."""
        training, grad, (device, _) = flags
        alike = [each for each in self.called if each[:2] == (training, grad) and each[2][0] == device]
        return any(each != flags and now - self.called[each] < OTHER_PLACE_SECONDS for each in alike)
