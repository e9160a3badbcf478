"""What a ledger reports of a choice."""

from __future__ import annotations

from cpulaunch.records.record import record


@record
class Verdict:
    """A choice: the mode, its speed-up over plain (None: plain has no samples), and each mode's number of samples."""

    mode: str
    speedup: float | None
    samples: dict[str, int]
