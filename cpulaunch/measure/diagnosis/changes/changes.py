"""Which parts of a step grew and which shrank from one diagnosis to another. Pure."""

from __future__ import annotations

from cpulaunch.measure.diagnosis.diagnosis import FEW_STEPS, MANY_OTHERS, step_time
from cpulaunch.measure.diagnosis.diagnosis_text import LABELS
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpulaunch.measure.diagnosis.changes.document import Document

LEAST_CHANGE = 0.02
"""Of the longer one's step: smaller changes are not told from chance."""
MOST_NAMED = 3


@record
class PartChange:
    """A part of a step, in seconds and as shares of a step, before and after."""

    name: str
    before: float
    after: float
    before_share: float
    after_share: float

    @property
    def seconds(self) -> float:
        """By how much it grew; less than zero if it shrank."""
        return self.after - self.before

    @property
    def label(self) -> str:
        """What it is called; its name if a later version wrote it."""
        return LABELS.get(self.name, self.name)


@record
class DiagnosisChange:
    """Two diagnoses, with the parts that either of them has, the largest change first."""

    before: Document
    after: Document
    parts: tuple[PartChange, ...]
    remarks: tuple[str, ...]

    @property
    def speedup(self) -> float:
        """How many times as fast steps are after."""
        return self.before.seconds / self.after.seconds

    @property
    def notable(self) -> tuple[PartChange, ...]:
        """The parts whose change is worth a word."""
        least = LEAST_CHANGE * max(self.before.seconds, self.after.seconds)
        return tuple(each for each in self.parts if abs(each.seconds) >= least)


def changed(before: Document, after: Document) -> DiagnosisChange:
    """What changed from the first diagnosis to the second."""
    parts = [
        PartChange(
            name=name,
            before=before.parts.get(name, 0.0),
            after=after.parts.get(name, 0.0),
            before_share=before.share(name),
            after_share=after.share(name),
        )
        for name in dict.fromkeys((*before.parts, *after.parts))
    ]
    parts.sort(key=lambda each: -abs(each.seconds))
    return DiagnosisChange(before=before, after=after, parts=tuple(parts), remarks=tuple(_doubts(before, after)))


def verdict(found: DiagnosisChange) -> str:
    """Whether steps are faster, and which parts made them so, in a sentence."""
    times = f"{step_time(found.before.seconds)} before, {step_time(found.after.seconds)} after"
    if 1 / (1 + LEAST_CHANGE) < found.speedup < 1 + LEAST_CHANGE:
        said = f"steps take as long as before: {times}"
    elif found.speedup > 1:
        said = f"steps are {found.speedup:.3g} times as fast: {times}"
    else:
        said = f"steps take {1 / found.speedup:.3g} times as long: {times}"
    named = [_words(each) for each in found.notable[:MOST_NAMED]]
    return f"{said}; {', '.join(named) or 'no part of them changed by more than 2%'}"


def _words(part: PartChange) -> str:
    word = "grew" if part.seconds > 0 else "shrank"
    return f"{part.label} {word} by {step_time(abs(part.seconds))}"


def bottlenecks_text(found: DiagnosisChange) -> str:
    """The first bottleneck of each, in a sentence."""
    before, after = _bottleneck(found.before), _bottleneck(found.after)
    return f"first bottleneck before: {before}; after: {after}"


def _bottleneck(document: Document) -> str:
    return "none" if document.first is None else f"{document.first}, {document.first_share:.0%} of a step"


def _doubts(before: Document, after: Document) -> Iterator[str]:
    """What makes the two hard to compare."""
    if before.host != after.host:
        yield f"they are of different hosts: {before.host} and {after.host}"
    if before.program != after.program:
        yield f"their command lines differ: {' '.join(before.program)} and {' '.join(after.program)}"
    if before.step != after.step:
        yield f"their steps are not the same: {_named(before.step)} and {_named(after.step)} end them"
    if before.threads != after.threads:
        yield f"their numbers of threads differ: {_named(before.threads)} and {_named(after.threads)}"
    if before.processes != after.processes:
        yield f"their numbers of processes differ, of which these are means: {before.processes} and {after.processes}"
    elif before.processes > 1:
        yield f"they are means of {before.processes} processes"
    if max(before.others, after.others) >= MANY_OTHERS:
        shares = f"{before.others:.0%} and {after.others:.0%}"
        yield f"other programs took the CPU for {shares} of the time, which is left out"
    if min(before.steps, after.steps) < FEW_STEPS:
        yield "there were few steps; more give surer shares"
    yield "each is one measurement: differences of a few percent may be chance"


def _named(values: frozenset[str] | frozenset[int]) -> str:
    return " or ".join(sorted(map(str, values)))
