"""The ledgers of all modules that a process calls: which mode a call runs in, and what its duration decides."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

from cpulaunch.worker.ledger.decision import PLAIN
from cpulaunch.worker.ledger.family import ModuleFamilies
from cpulaunch.worker.ledger.module_ledger import Flags, ModuleEntry
from cpulaunch.worker.ledger.presence import Presence
from cpulaunch.worker.ledger.runs import (
    FIRST_RUN,
    FIRST_SLACK,
    FULL_RUN_CALLS,
    LAST_RUN,
    LAST_SLACK,
    OTHER_RUN_SECONDS,
    RUN_SECONDS,
    SHORT_RUN_SECONDS,
    Turn,
    UnmeasuredRun,
)
from cpulaunch.worker.ledger.signature import describe
from cpulaunch.worker.reporting.events import report_event

RETRY_SECONDS = 1.0
"""Seconds, or else LAST_RUN calls, after which modes of a module are found out again where only plain was possible."""

MAX_REPORTS = 8
"""Choices that are reported for one module."""

Key = tuple[int, bool, bool]
"""The address of a module, whether it is in training mode, and whether gradients are enabled."""

ALL_FLAGS = ((False, False), (False, True), (True, False), (True, True))
"""The flags that distinguish the runs of a module."""


class Chooser:
    """Chooses the mode of each top-level call, and reports the choices; thread-safe.

    `candidates`: the modes possible for a module at the moment, the one expected to be best first; it is used always
    unless `measured`. `retire` is called with a module and the modes that have lost, and returns those that are over
    for the module. `runs`: for modules by training mode and gradients, their plain calls that need not be measured: a
    program that alternates between them, as to act and to learn, is not measured for ever. `presence` counts them.
    `is_guarded`: whether the wrapper of calls must see these too, so that they are in no run that it counts down by
    itself. `place_of`: what else decides about the modes possible for a module, its device first.

    A call in eval mode is measured by its duration, a call in training by the time until the next one, which includes
    the backward pass and the optimizer. In a job of several ranks, each rank chooses for itself, and they share what
    trials in training may cost, as they wait for one another.
    """

    def __init__(
        self,
        candidates: Callable[[nn.Module], tuple[str, ...]],
        retire: Callable[[nn.Module, set[str]], set[str]],
        *,
        measured: bool = True,
        is_guarded: Callable[[nn.Module], bool] = lambda module: False,
        place_of: Callable[[nn.Module], tuple[str, bool]] = lambda module: ("cpu", False),
    ) -> None:
        self._measured = measured
        self._is_guarded, self._place_of = is_guarded, place_of
        self._candidates = candidates
        self._retire = retire
        self._entries: dict[int, ModuleEntry] = {}
        self.runs: dict[Key, UnmeasuredRun] = {}
        self._other_runs: dict[Key, dict[tuple[str, bool], UnmeasuredRun]] = {}
        self.presence: Presence | None = None
        self._families = ModuleFamilies()
        self._numbers = Random(0)
        self._lock = threading.RLock()
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _renew(reference))

    def renew_lock(self) -> None:
        """Effect: releases the lock in a forked child, where another thread's hold on it would last forever."""
        self._lock = threading.RLock()

    def unmeasured(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], now: float) -> str | None:
        """The mode of this call of the module if it need not be measured, or None. Effect: counts it down.

        A call whose signature has not chosen the mode is measured: another mode may be far faster for it.
        """
        key = (id(module), module.training, torch.is_grad_enabled())
        plain, others = self.runs.get(key), self._other_runs.get(key)
        runs = [run for run in (plain, *(others or {}).values()) if run and run.left > 0 and run.until >= now]
        if not runs:
            return None
        signature = (self._flags(module), self._entry(module).signatures.of(args, kwargs))
        for run in runs:
            if run.holds(signature):
                if run.seconds <= 0:
                    run.end_soon()
                run.left -= 1
                return run.mode
        return None

    def turn(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], now: float) -> Turn:
        """The mode in which this call runs. `now`: the time, in seconds."""
        with self._lock:
            entry = self._entry(module)
            flags = self._flags(module)
            self._end_run(entry, flags[:2], now)
            ended = self._end_step(entry, now)
            if ended is not None and ended[0][:2] != flags[:2]:
                self._start_run_if_chosen(entry, ended, now, is_step=True)
            modes = self._modes(entry, module, flags, now)
            if len(modes) == 1:
                if modes[0] == PLAIN:
                    run = UnmeasuredRun(PLAIN, self._random_size(LAST_RUN), (flags, ()), until=entry.retry)
                    self._start_run(entry, run, is_seen=entry.has_others(flags, now) or self._is_seen(entry))
                return Turn(entry, None, modes[0], is_step=False)
            if entry.has_failed:
                return Turn(entry, None, PLAIN, is_step=False)
            signature = (flags, entry.signatures.of(args, kwargs))
            self._end_run_of(entry, signature, now)
            if ended == signature and self._start_run_if_chosen(entry, signature, now, is_step=True):
                return Turn(entry, None, PLAIN, is_step=False)
            is_step = flags[0] and flags[1]
            if not entry.has_family:  # Not for a module with one mode, as it takes a while.
                entry.ledger.join(self._families.of(module))
                entry.has_family = True
            mode = entry.ledger.next(signature, modes, in_blocks=is_step, ranks=ranks_in_job() if is_step else 1)
            turn = Turn(entry, signature, mode, is_step=is_step)
            if is_step:
                for each in ALL_FLAGS:  # The next call, of whatever kind, ends the step.
                    self._end_run(entry, each, now)
                    for run in self._other_runs.pop((entry.address, *each), {}).values():
                        _count_run(entry, run)
                entry.step = (turn, now)
            return turn

    def add(self, turn: Turn, seconds: float, *, now: float, steady: bool = True, pending: bool = False) -> None:
        """Effect: counts a call that has ended `now`. `steady`, `pending`: see Decision.add and Decision.postpone."""
        turn.entry.has_failed = False
        if turn.is_step or turn.signature is None:
            return
        with self._lock:
            if pending:
                turn.entry.ledger.postpone(turn.signature, turn.mode, seconds)
                return
            self._count(turn, seconds, steady=steady)
            self._start_run_if_chosen(turn.entry, turn.signature, now, is_step=False)

    def fail(self, turn: Turn) -> None:
        """Effect: forgets a call that has raised an exception.

        The next one is plain: where all calls end so, as if a part stops them early, no duration could choose a mode.
        """
        turn.entry.step, turn.entry.has_failed = None, True

    def tell(self, presence: Presence, turn: Turn | None, unmeasured: str | None, now: float) -> None:
        """Effect: tells what a call is: plain for good, in another mode that has been chosen, or neither."""
        decision = None if turn is None else turn.entry.ledger.decisions.get(turn.signature)
        mode = unmeasured if turn is None else turn.mode
        is_chosen = turn is None or decision is None or (decision.chosen == mode and not decision.is_sampling)
        if turn is not None and mode == PLAIN and is_chosen:
            presence.look(now)
        elif mode not in (None, PLAIN) and is_chosen:
            presence.stay()
        else:
            presence.see_other()

    def seconds(self, module: nn.Module) -> float:
        """The duration of the module's calls so far; those that were not measured count as typical ones."""
        entry = self._entries.get(id(module))
        return entry.ledger.account.total if entry is not None and entry.module() is module else 0.0

    def fastest_but(self, mode: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Of the modes other than this one, the one that has been the fastest for such calls; plain if none has run.

        None if such calls are not measured.
        """
        entry = self._entry(module)
        return entry.ledger.fastest_but(mode, (self._flags(module), entry.signatures.of(args, kwargs)))

    def remove(self, module: nn.Module, mode: str) -> None:
        """Effect: calls of the module do not run in this mode any more."""
        with self._lock:
            self._remove(self._entry(module), mode)

    def restart(self, module: nn.Module) -> None:
        """Effect: forgets all choices for the module: other modes than before are possible."""
        with self._lock:
            entry = self._entries.get(id(module))
            if entry is not None and entry.module() is module:
                self._forget(entry)
                renewed = self._entry(module)
                renewed.ledger.join(entry.ledger.family, like=entry.ledger)
                renewed.has_family = entry.has_family

    def _modes(self, entry: ModuleEntry, module: nn.Module, flags: Flags, now: float) -> tuple[str, ...]:
        """The modes possible for the module now; if there is no other than plain, they are looked for again later."""
        if entry.retry <= now:
            entry.modes = {each: modes for each, modes in entry.modes.items() if modes != (PLAIN,)}
            entry.retry = now + RETRY_SECONDS
        modes = entry.modes.get(flags)
        if modes is None:
            modes = entry.modes[flags] = self._candidates(module)[: None if self._measured else 1]
        if modes != (PLAIN,):
            entry.called[flags] = now
        return modes

    def _flags(self, module: nn.Module) -> Flags:
        return module.training, torch.is_grad_enabled(), self._place_of(module)

    def _remove(self, entry: ModuleEntry, mode: str) -> None:
        entry.ledger.remove(mode)
        entry.modes.clear()
        for each in ALL_FLAGS:
            self._other_runs.get((entry.address, *each), {}).pop((mode, False), None)

    def _entry(self, module: nn.Module) -> ModuleEntry:
        entry = self._entries.get(id(module))
        if entry is None or entry.module() is not module:
            entry = self._entries[id(module)] = ModuleEntry(module)
            weakref.finalize(module, self._leave, entry).atexit = False
        return entry

    def _leave(self, entry: ModuleEntry) -> None:
        if self._entries.get(entry.address) is entry:  # Else all choices for the module were forgotten before.
            entry.ledger.family.leave(entry.ledger.decisions)
            self._forget(entry)

    def _forget(self, entry: ModuleEntry) -> None:
        if self._entries.get(entry.address) is entry:
            del self._entries[entry.address]
            for each in ALL_FLAGS:
                self.runs.pop((entry.address, *each), None)
                self._other_runs.pop((entry.address, *each), None)

    # Durations

    def _end_step(self, entry: ModuleEntry, now: float) -> Any:
        """The signature of the training step that ends now; None if there is none. Effect: counts its duration."""
        if entry.step is None:
            return None
        (turn, started), entry.step = entry.step, None
        self._count(turn, now - started, steady=True)
        return turn.signature

    def _count(self, turn: Turn, seconds: float, *, steady: bool) -> None:
        entry, decision = turn.entry, turn.entry.ledger.decisions.get(turn.signature)
        was_sampling = decision is not None and decision.is_sampling
        if entry.ledger.add(turn.signature, turn.mode, seconds, steady=steady):
            entry.run_size, entry.slack = FIRST_RUN, FIRST_SLACK
            self._report(entry, turn.signature)
        if was_sampling and decision is not None and not decision.is_sampling:
            modes = {mode for each in entry.ledger.decisions.values() for mode in each.modes} - {PLAIN}
            self._give_up(entry, set(filter(entry.ledger.is_useless, modes)))

    def _give_up(self, entry: ModuleEntry, modes: set[str]) -> None:
        """Effect: lets the owner of the modes free what it holds for the module; it says which of them are over."""
        module = entry.module()
        for mode in self._retire(module, modes) if module is not None and modes else ():
            self._remove(entry, mode)

    def _report(self, entry: ModuleEntry, signature: Any) -> None:
        entry.reports += 1
        if entry.reports > MAX_REPORTS:
            return
        flags, shapes = signature
        verdict = entry.ledger.decisions[signature].verdict()
        report_event(
            "chosen",
            module=entry.name,
            signature=describe(shapes) + (", training" if flags[0] else ", with gradients" if flags[1] else ""),
            mode=verdict.mode,
            speedup=None if verdict.speedup is None else round(verdict.speedup, 3),
            samples=verdict.samples,
        )

    # Calls that are not measured

    def _start_run_if_chosen(self, entry: ModuleEntry, signature: Any, now: float, *, is_step: bool) -> bool:
        """Whether the next calls run without being measured. Effect: starts such a run where a mode is chosen."""
        decision = entry.ledger.decisions.get(signature)
        if decision is None or decision.chosen is None or decision.is_sampling:
            return False
        if entry.to_measure > 0 and entry.ledger.account.may_measure():
            entry.to_measure -= 1
            return False
        entry.to_measure = 0
        mode = decision.chosen
        if is_step and mode != PLAIN:
            return False
        alike = [other for other in entry.ledger.recent() if other[0][:2] == signature[0][:2]]  # type: ignore[index]
        typical = decision.estimate(mode)
        calls = (RUN_SECONDS if mode == PLAIN else OTHER_RUN_SECONDS) / max(typical, 1e-9)
        if calls < 1 or not entry.ledger.has_decided(alike):
            return False
        is_short = mode == PLAIN and not is_step
        longest = max(LAST_RUN, int(SHORT_RUN_SECONDS / max(typical, 1e-6))) if is_short else LAST_RUN
        size = min(entry.run_size, int(calls), longest)
        size = self._random_size(size)
        chosen = frozenset(other for other in alike if entry.ledger.decisions[other].has_chosen(mode))
        is_mixed = any(entry.ledger.decisions[other].chosen not in (mode, None) for other in alike)
        is_seen = mode != PLAIN or is_mixed or self._is_seen(entry)
        seconds, run = size * typical, UnmeasuredRun(mode, size, signature, chosen=chosen)
        if is_seen or is_step:
            run.until = now + (entry.other_slack if is_seen else entry.slack) * seconds
        else:
            run.limit(typical, entry.slack)
        self._start_run(entry, run, is_seen=is_seen)
        entry.run_size = min(2 * entry.run_size, longest)
        return True

    def _random_size(self, size: int) -> int:
        """A run's size that is in step with no period of the program's calls."""
        return self._numbers.randint((size + 1) // 2, size)

    def _is_seen(self, entry: ModuleEntry) -> bool:
        """Whether the wrapper must see each call of the module."""
        module = entry.module()
        return module is not None and self._is_guarded(module)

    def _start_run(self, entry: ModuleEntry, run: UnmeasuredRun, *, is_seen: bool) -> None:
        """Effect: starts the run. `is_seen`: the chooser looks at its calls, as other ones must not be in it."""
        if self._entries.get(entry.address) is not entry:  # All choices for the module were forgotten during the call.
            return
        training, grad, _ = run.signature[0]
        key = (entry.address, training, grad)
        if not is_seen:
            self.runs[key] = run
            return
        runs = self._other_runs.setdefault(key, {})
        kind = (run.mode, run.chosen is None)
        if kind in runs:  # One of other signatures.
            _count_run(entry, runs[kind])
        runs[kind] = run

    def _end_run(self, entry: ModuleEntry, flags: tuple[bool, bool], now: float) -> None:
        """Effect: ends the run of plain calls with these flags, of whatever signature, and counts them."""
        run = self.runs.pop((entry.address, *flags), None)
        if run is None:
            return
        if self.presence is not None:
            self.presence.count(run.size - max(run.left, 0), entry.parts())
        if run.chosen is None:
            entry.retry = entry.retry if run.left > 0 else now
            return
        calls = _count_run(entry, run)
        if run.until < now or run.seconds <= 0:
            is_first = entry.slack == FIRST_SLACK
            to_measure = LAST_RUN if is_first else int(calls * FIRST_SLACK / entry.slack)
            entry.slack = min(2 * entry.slack, LAST_SLACK)
        else:
            to_measure = calls // max(FULL_RUN_CALLS, run.size * FULL_RUN_CALLS // LAST_RUN)
        entry.to_measure = max(entry.to_measure, to_measure)  # Some may be left after a run with other flags.

    def _end_run_of(self, entry: ModuleEntry, signature: Any, now: float) -> None:
        """Effect: ends the run in which calls of this signature, and of others with the same choice, are."""
        runs = self._other_runs.get((entry.address, *signature[0][:2]), {})
        for run in list(runs.values()):
            if run.holds(signature):
                _count_run(entry, runs.pop((run.mode, run.chosen is None)))
                if run.until < now:  # The program waits between its calls.
                    entry.other_slack = min(2 * entry.other_slack, LAST_SLACK)


def _count_run(entry: ModuleEntry, run: UnmeasuredRun) -> int:
    """How many calls were in the run. Effect: counts them, in the ledger too."""
    calls = run.size - max(run.left, 0)
    entry.ledger.skip(run.signature, calls)
    return calls


def ranks_in_job() -> int:
    """How many ranks train together."""
    is_job = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_job else 1


def _renew(reference: weakref.ref[Chooser]) -> None:
    chooser = reference()
    if chooser is not None:
        chooser.renew_lock()
