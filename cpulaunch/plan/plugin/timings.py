"""What an all-reduce took on this host over gloo and over ccl, and which of the two that speaks for."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

SIZES = (1 << 20, 25 << 20)
"""Bytes of the first and of the other buckets of DistributedDataParallel. Source: torch, DDP's bucket_cap_mb."""
GAIN = 1.05
"""How many times faster ccl must be, at every size, to be worth a change."""


@record(kw_only=False)
class Timing:
    """Median seconds of an all-reduce of so many bytes."""

    size_bytes: int
    gloo_seconds: float
    ccl_seconds: float


@record
class CollectiveMeasurement:
    """The timings; or why there are none. `fresh`: taken for this launch, else remembered."""

    timings: tuple[Timing, ...] = ()
    failure: str | None = None
    fresh: bool = False

    @property
    def backend(self) -> Literal["gloo", "ccl"]:
        """The one to use: ccl if it is faster at every size."""
        faster = [timing.gloo_seconds > GAIN * timing.ccl_seconds for timing in self.timings]
        return "ccl" if faster and all(faster) else "gloo"

    @property
    def summary(self) -> str:
        """The numbers, or what went wrong, in one line."""
        if self.failure is not None:
            return f"it could not be measured ({self.failure})"
        times = (
            f"{size(t.size_bytes)} in {_ms(t.ccl_seconds)}, over gloo in {_ms(t.gloo_seconds)} ms" for t in self.timings
        )
        return f"an all-reduce over ccl of {'; of '.join(times)}"


def size(count: int) -> str:
    """Bytes for a person: "25 MB"."""
    return f"{count >> 20} MB" if count >= 1 << 20 else f"{count} bytes"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def encode(timings: tuple[Timing, ...]) -> str:
    """Timings as one line of text."""
    return " ".join(f"{each.size_bytes}:{each.gloo_seconds:.9f}:{each.ccl_seconds:.9f}" for each in timings)


def decode(text: str | None) -> CollectiveMeasurement | None:
    """What encode wrote; None if that is not it."""
    try:
        rows = [row.split(":") for row in (text or "").split()]
        timings = tuple(Timing(int(count), float(gloo), float(ccl)) for count, gloo, ccl in rows)
    except ValueError:
        return None
    sound = timings and all(each.size_bytes > 0 and each.gloo_seconds > 0 and each.ccl_seconds > 0 for each in timings)
    return CollectiveMeasurement(timings=timings) if sound else None
