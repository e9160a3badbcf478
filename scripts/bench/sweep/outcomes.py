"""Pure part of scripts/bench/architectures: what became of each model, from its events and results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from report import format_table

Kind = Literal[
    "whole", "parts", "not faster", "eager", "pending", "wrong", "failed", "died", "not finished", "not built"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
MEANINGS: Mapping[str, str] = {
    "whole": "captured as a whole",
    "parts": "captured in parts",
    "not faster": "could be captured; eager execution is faster",
    "eager": "runs eagerly",
    "pending": "neither captured nor refused within --wait-seconds",
    "wrong": "gave another result than plain python",
    "failed": "raised an error that plain python does not raise",
    "died": "the process died",
    "not finished": "ended by the sweep, because it had no result in time",
    "not built": "not part of the sweep: cannot be built small, or fails under plain python",
}
NOT_FASTER = ("eager execution is faster", "without captured graphs are faster")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a model, why, and after how many calls. `otherwise`: its kind if "wrong" is disproved."""

    name: str
    kind: Kind
    reason: str = ""
    calls: int = 0
    otherwise: Kind = "eager"


def kind_of(events: Iterable[Mapping[str, Any]], outer: str) -> tuple[Kind, str]:
    """What the events of a model of the class `outer` say, and the reasons given for it."""
    captured: list[str] = []
    reasons: list[tuple[str, str]] = []
    for event in events:
        if event.get("event") == "captured":
            captured.append(str(event.get("module")))
        elif event.get("event") == "eager":
            reasons.append((str(event.get("module")), str(event.get("reason"))))
    if outer in captured:
        return "whole", ""
    own = [reason for module, reason in reasons if module == outer] or [reason for _, reason in reasons]
    if captured:
        return "parts", "; ".join([*own[:1], f"{len(captured)} captures: {', '.join(_counted(captured))}"])
    if not reasons:
        return "pending", ""
    not_faster = any(text in reason for _, reason in reasons for text in NOT_FASTER)
    return ("not faster" if not_faster else "eager"), "; ".join(own[:2])


def _counted(names: Sequence[str]) -> list[str]:
    return [name if count == 1 else f"{count} {name}" for name, count in Counter(names).most_common(3)]


def read_lines(text: str) -> tuple[list[Outcome], str | None]:
    """The outcomes in the file of a worker, and the model that it had started when it ended, if any."""
    outcomes: list[Outcome] = []
    started: str | None = None
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # Of a process that was ended while it wrote.
            break
        if "start" in entry:
            started = entry["start"]
        else:
            outcomes.append(Outcome(**entry))
            started = None
    return outcomes, started


def settled(outcomes: Iterable[Outcome], judged: Mapping[str, Outcome]) -> list[Outcome]:
    """The outcomes, with those that differ from plain python replaced by their judgement in fp64 where there is one."""
    return [_settled(outcome, judged.get(outcome.name)) for outcome in outcomes]


def _settled(outcome: Outcome, judged: Outcome | None) -> Outcome:
    if judged is None or outcome.kind != "wrong":
        return outcome
    if judged.kind == "eager":
        return replace(outcome, kind=outcome.otherwise, reason=f"as near to fp64 as plain python: {outcome.reason}")
    return replace(outcome, reason=f"{outcome.reason}; {judged.reason}")


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Kind -> number of models, for kinds that occur."""
    found = Counter(outcome.kind for outcome in outcomes)
    return {kind: found[kind] for kind in KINDS if found[kind]}


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """A table with a row for each model, sorted by kind, then the counts."""
    ordered = sorted(outcomes, key=lambda outcome: (KINDS.index(outcome.kind), outcome.name))
    lines = [format_table(["model", "calls"], [[each.name, str(each.calls)] for each in ordered])]
    rows = lines[0].splitlines()
    width = max(len(kind) for kind in KINDS)
    table = [f"{rows[0]}  {'result'.ljust(width)}  reason"]
    table += [
        f"{row}  {each.kind.ljust(width)}  {each.reason}".rstrip() for row, each in zip(rows[1:], ordered, strict=True)
    ]
    return "\n".join([*table, "", format_counts(outcomes)])


def format_progress(outcomes: Sequence[Outcome]) -> str:
    """A line with the models of each kind."""
    names = {kind: [outcome.name for outcome in outcomes if outcome.kind == kind] for kind in KINDS}
    return "; ".join(f"{kind}: {' '.join(found)}" for kind, found in names.items() if found)


def format_counts(outcomes: Sequence[Outcome]) -> str:
    """A line for each kind with its number and meaning, and the number of models that were run."""
    found = counts(outcomes)
    run = sum(found.values()) - found.get("not built", 0)
    return "\n".join(
        [*(f"{count:4}  {kind}: {MEANINGS[kind]}" for kind, count in found.items()), f"{run:4}  models run"]
    )
