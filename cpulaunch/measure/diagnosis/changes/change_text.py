"""The difference of two diagnoses in words and as a table. Pure."""

from __future__ import annotations

from cpulaunch.measure.diagnosis.changes.changes import bottlenecks_text, verdict
from cpulaunch.measure.diagnosis.diagnosis import step_time
from cpulaunch.records.errors import escaped
from cpulaunch.view.text import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cpulaunch.measure.diagnosis.changes.changes import DiagnosisChange, PartChange

LEAST = 0.005
"""Of the longer one's step: a part that takes less in both is not in the table."""
LABEL_WIDTH, TIME_WIDTH = 24, 10


def change_text(found: DiagnosisChange, *, width: int, strong: Callable[[str], str]) -> str:
    """All of it. `strong`: writes the verdict so that it is seen first."""
    lines = [strong(line) for line in wrapped(escaped(verdict(found)), width)]
    lines += wrapped(escaped(bottlenecks_text(found)), width)
    lines += ["", *_table(found), ""]
    for remark in found.remarks:
        lines += wrapped(escaped(remark), width)
    return "\n".join(lines)


def _table(found: DiagnosisChange) -> Iterator[str]:
    """A line for each part, the largest change first, and one for whole steps."""
    longest = max(found.before.seconds, found.after.seconds)
    yield _line("part of a step", "before", "after", "change", "share")
    for part in found.parts:
        if max(part.before, part.after) >= LEAST * longest:
            yield _part_line(part)
    before, after = found.before.seconds, found.after.seconds
    yield _line("all of it", step_time(before), step_time(after), signed_time(after - before), "")


def _part_line(part: PartChange) -> str:
    shares = f"{part.before_share:.0%} to {part.after_share:.0%}"
    return _line(
        escaped(part.label)[:LABEL_WIDTH],
        step_time(part.before),
        step_time(part.after),
        signed_time(part.seconds),
        shares,
    )


def _line(label: str, before: str, after: str, change: str, share: str) -> str:
    times = "".join(f"{each:>{TIME_WIDTH}}" for each in (before, after, change))
    return f"  {label:{LABEL_WIDTH}}{times}  {share}".rstrip()


def signed_time(seconds: float) -> str:
    """A change of a time, with its sign."""
    return f"{'-' if seconds < 0 else '+'}{step_time(abs(seconds))}"
