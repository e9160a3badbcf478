"""How fast a process computed and moved data, as shares of what the machine can do. Pure."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpulaunch.measure.diagnosis.figures import ProcessFigures


@record
class Ceilings:
    """What the machine can do, as calibrated. `products`: GFLOP/s by precision. `bandwidth`: GB/s of reading memory.

    `cache_bytes`: of all its last-level caches; what is smaller may never reach the memory.
    """

    products: Mapping[str, float] = {}
    bandwidth: float | None = None
    cache_bytes: int = 0


NO_CEILINGS = Ceilings()


def rates(figures: ProcessFigures, ceilings: Ceilings, *, sharers: int = 1) -> dict[str, float]:
    """ "products": GFLOP/s of matrix products; "bandwidth": GB/s of element-wise operations that no cache serves.

    "of_ceiling" and "of_bandwidth": as shares of the machine's, which `sharers` processes divide among them. "hidden":
    the share of the time of collectives in which the process computed.
    """
    found = _hidden(figures) | _with_share("products", _products(figures), "of_ceiling", _fp32(ceilings), sharers)
    return found | _with_share("bandwidth", _bandwidth(figures, ceilings), "of_bandwidth", ceilings.bandwidth, sharers)


def _with_share(
    name: str, rate: float | None, share_name: str, ceiling: float | None, sharers: int
) -> dict[str, float]:
    if rate is None:
        return {}
    return {name: rate, **({share_name: rate * sharers / ceiling} if ceiling else {})}


def _hidden(figures: ProcessFigures) -> dict[str, float]:
    found = (figures.window or {}).get("communication", {})
    return {"hidden": found["hidden"] / found["seconds"]} if found.get("seconds", 0.0) > 0 else {}


def _fp32(ceilings: Ceilings) -> float | None:
    return max((value for name, value in ceilings.products.items() if name.startswith("fp32")), default=None)


def _products(figures: ProcessFigures) -> float | None:
    """GFLOP/s."""
    window = figures.window or {}
    flops = window.get("flops", {}).get("products", 0.0)
    return _rate(flops, window.get("timed", {}).get("products", 0.0))


def _bandwidth(figures: ProcessFigures, ceilings: Ceilings) -> float | None:
    """GB/s. Operations on less than twice what the caches hold do not count: nothing says where their data were."""
    window = figures.window or {}
    found = window.get("bytes")
    if not isinstance(found, dict):
        return None
    large = [pair for bits, pair in found.items() if 1 << int(bits) >= 4 * ceilings.cache_bytes]
    return _rate(sum(moved for moved, _ in large), sum(seconds for _, seconds in large))


def _rate(amount: float, seconds: float) -> float | None:
    return 1e-9 * amount / seconds if amount and seconds > 0 else None
