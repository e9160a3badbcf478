"""Choices of libraries that follow from what was measured on this machine; a plan without figures does not need it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpulaunch.records.host import Calibration

GAIN = 1.1
"""How many times as fast a choice must be to replace the one that is made without a measurement."""


def fastest(times: Mapping[str, float], usual: Sequence[str]) -> str | None:
    """The subject of the shortest time; of the usual ones, the first that was measured stays unless it loses clearly.

    None if neither a usual one nor another was measured.
    """
    if not times:
        return None
    best = min(times, key=lambda name: times[name])
    first = next((name for name in usual if name in times), None)
    return best if first is None or times[first] > GAIN * times[best] else first


def measured_reason(times: Mapping[str, float], what: str) -> str:
    """The times in a sentence that says where they come from."""
    texts = (f"{name} {value:.3g} µs" for name, value in sorted(times.items(), key=lambda pair: pair[1]))
    return f"measured here: {what} takes {', '.join(texts)}"


def measured_openmp(calibration: Calibration) -> tuple[tuple[str, ...], str] | None:
    """Intel's runtime, or none where torch's own was clearly faster, with the reason; None if not measured."""
    times = {name: value for name, value in calibration.values("parallel operation").items() if name != "llvm"}
    if not {"intel", "gnu"} <= times.keys():
        return None
    names = () if fastest(times, ("intel",)) == "gnu" else ("intel",)
    return names, measured_reason(times, "a small operation on all threads")


def measured_allocator(calibration: Calibration, usual: tuple[str, ...]) -> tuple[tuple[str, ...], str] | None:
    """Allocators, the best first, or none where the C library's was clearly faster, with the reason."""
    times = calibration.values("allocation")
    best = fastest(times, usual)
    if best is None or len(times) < 2:
        return None
    names = () if best == "default" else tuple(dict.fromkeys((best, *usual)))
    return names, measured_reason(times, "making a tensor")
