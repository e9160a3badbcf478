"""Times of an all-reduce on this host over gloo and over ccl, and the backend that they favour."""

from __future__ import annotations

from cpulaunch.records.host import size_text
from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

SIZES = (1 << 20, 25 << 20)
"""Bytes of the first and of the other buckets of DistributedDataParallel. Source: torch, DDP's bucket_cap_mb."""
GAIN = 1.05
"""How many times as fast as gloo ccl must be, at every size, to replace it."""
MOST_BYTES, MOST_SECONDS = 1 << 40, 1e6
"""Larger ones have not been measured, and may not be numbers that can be shown."""


@record(kw_only=False)
class Timing:
    """Median seconds of an all-reduce of `size_bytes`."""

    size_bytes: int
    gloo_seconds: float
    ccl_seconds: float


@record
class CollectiveMeasurement:
    """The timings, or why there are none. `fresh`: measured for this launch, not read from the cache."""

    timings: tuple[Timing, ...] = ()
    failure: str | None = None
    fresh: bool = False

    @property
    def backend(self) -> Literal["gloo", "ccl"]:
        """The backend to use: ccl if it is faster at every size."""
        faster = [timing.gloo_seconds > GAIN * timing.ccl_seconds for timing in self.timings]
        return "ccl" if faster and all(faster) else "gloo"

    @property
    def summary(self) -> str:
        """The timings or the failure, in one line."""
        if self.failure is not None:
            return f"the measurement failed ({self.failure})"
        times = (
            f"{size_text(timing.size_bytes)} in {_ms_text(timing.ccl_seconds)} (gloo: {_ms_text(timing.gloo_seconds)})"
            for timing in self.timings
        )
        return f"all-reduce over ccl: {', '.join(times)}"


def _ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def encode(timings: tuple[Timing, ...]) -> str:
    """The timings as one line of text, for the cache."""
    return " ".join(f"{each.size_bytes}:{each.gloo_seconds:.9f}:{each.ccl_seconds:.9f}" for each in timings)


def decode(text: str | None) -> CollectiveMeasurement | None:
    """The timings that `encode` wrote as this text; None if the text is something else."""
    try:
        rows = [row.split(":") for row in (text or "").split()]
        timings = tuple(Timing(int(count), float(gloo), float(ccl)) for count, gloo, ccl in rows)
    except ValueError:
        return None
    return CollectiveMeasurement(timings=timings) if timings and all(map(_is_plausible, timings)) else None


def _is_plausible(timing: Timing) -> bool:
    """Whether a timing may have been measured: any process of the user may write to the cache."""
    seconds = (timing.gloo_seconds, timing.ccl_seconds)
    return 0 < timing.size_bytes <= MOST_BYTES and all(0 < each <= MOST_SECONDS for each in seconds)
