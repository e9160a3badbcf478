"""Which operations must be left out so that a graph compiles: found by compiling parts of it, without effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpulaunch.records.record import record

Attempt = Callable[[frozenset[int]], "str | None"]
"""Compiles and runs the graph without these operations: None if that works, otherwise what happened."""


class ExhaustedError(Exception):
    """No further attempt is made; the message says why. `lasting`: another search would stop for the same reason."""

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


@record
class TrialOutcome:
    """The outcome for a graph: it works without the operations `left_out`, unless `refusal` says why it does not.

    `lasting`: another search would end in the same way. `seconds`: processor time that its compilation takes.
    `cut_after`: the time limit ended the search after so many seconds of processor time, 0 if it did not.
    """

    left_out: frozenset[int] = frozenset()
    refusal: str | None = None
    lasting: bool = True
    seconds: float = 0.0
    cut_after: float = 0.0

    def holds_within(self, limit: float) -> bool:
        """Whether another search with a limit of so many seconds would find no more."""
        return self.cut_after == 0 or self.cut_after >= limit


def search(
    attempt: Attempt,
    known: frozenset[int],
    groups: Callable[[], Sequence[frozenset[int]]],
    kin: Callable[[frozenset[int]], frozenset[int]] = lambda group: group,
) -> TrialOutcome:
    """The smallest set found of operations to leave out, whole groups at a time; at least those `known`.

    `groups` are operations that are alike, in the order of the graph. `kin`: a group with the others in the same place,
    which are left out too if that is enough and leaves something to fuse: to find each of them takes many attempts.
    `attempt` may raise ExhaustedError.
    """
    works: frozenset[int] | None = None
    left_out = known
    try:
        reason = attempt(left_out)
        if reason is None:
            return TrialOutcome(left_out=left_out)
        alike = [group - left_out for group in groups() if group - left_out]
        everything = left_out.union(*alike)
        last = attempt(everything)
        if last is not None:
            return TrialOutcome(refusal=last)
        works = everything
        while reason is not None and alike:
            culprit = alike.pop(_first_culprit(attempt, left_out, alike))
            left_out |= culprit
            reason = attempt(left_out)
            wider = left_out | kin(culprit)
            if reason is not None and left_out < wider < everything and attempt(wider) is None:
                return TrialOutcome(left_out=wider)
    except ExhaustedError as error:
        if works is None:
            return TrialOutcome(refusal=str(error), lasting=error.lasting)
        return TrialOutcome(left_out=works, lasting=error.lasting)
    return TrialOutcome(left_out=left_out if reason is None else works)


def _first_culprit(attempt: Attempt, left_out: frozenset[int], groups: Sequence[frozenset[int]]) -> int:
    """The index of the last group of the shortest beginning of `groups` that cannot be compiled."""
    low, high = 0, len(groups)
    while high - low > 1:
        middle = (low + high) // 2
        if attempt(left_out.union(*groups[middle:])) is None:
            low = middle
        else:
            high = middle
    return high - 1
