"""An open-loop load for a program that serves requests one after the other, and the latencies that it has under it.

Requests arrive at random moments (a Poisson process) that are drawn before the first one is served, whatever the
program does: one that is slow lets a queue grow, and each request's latency counts from its arrival. A closed loop,
which sends a request when the last one is done, would hide that. Source: Schroeder, Wierman, Harchol-Balter, Open
versus closed: a cautionary tale (2006); Tene, How not to measure latency (2015).
"""

from __future__ import annotations

import math
import os
import random

from cpulaunch.records.torch_settings import OFFERED_LOAD, RATE_VARIABLE
from cpulaunch.worker.reporting.events import report_metric

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SEED = 20260101
PERCENTILES = (50, 95, 99)
MAX_COUNT = 10_000_000
LEAST_SECONDS = 1e-9
"""Between the first arrival and the last one, at least: at enormous rates they are at the same moment."""


def serve(
    rate: float,
    count: int,
    warm_up: int,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> Iterator[int]:
    """The numbers of requests, each when it arrives or when the one before it is done, whichever is later.

    The next request is asked for when one is done. `warm_up`: requests before them, without waiting, which do not
    count. Effect: reports percentiles of the latencies, in milliseconds, requests per second, and the offered load.
    Raises: ValueError.
    """
    arrivals = arrival_times(chosen_rate(rate), count)
    yield from range(warm_up)
    latencies: list[float] = []
    needed: list[float] = []
    begun = clock()
    try:
        for number, arrival in enumerate(arrivals):
            while (early := begun + arrival - clock()) > 0:
                sleep(early)
            started = clock()
            yield warm_up + number
            ended = clock()
            latencies.append(ended - begun - arrival)
            needed.append(ended - started)
    finally:
        if latencies:
            _report(latencies, seconds=clock() - begun)
        if len(latencies) > 1:
            report_metric(OFFERED_LOAD, offered_load(arrivals, needed))


def chosen_rate(rate: float) -> float:
    """Requests per second: those of `tune --rate`, else those of the program. Raises: ValueError."""
    text = os.environ.get(RATE_VARIABLE)
    chosen = float(text) if text else float(rate)
    if not (math.isfinite(chosen) and chosen > 0):
        raise ValueError(f"the rate of requests must be a number above 0, not {chosen}")
    return chosen


def arrival_times(rate: float, count: int) -> list[float]:
    """When requests arrive, in seconds from the start: the same in every run. Raises: ValueError."""
    if not 0 < count <= MAX_COUNT:
        raise ValueError(f"the number of requests must be from 1 to {MAX_COUNT}, not {count}")
    draw = random.Random(SEED)
    times, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def offered_load(arrivals: Sequence[float], needed: Sequence[float]) -> float:
    """The seconds that requests need, by those from the first arrival to the last one, of two requests at least.

    The last request is left out: what it needs, no other one waits for. `arrivals` may have more than were served.
    """
    return math.fsum(needed[:-1]) / max(LEAST_SECONDS, arrivals[len(needed) - 1] - arrivals[0])


def percentile(sorted_values: Sequence[float], percent: int) -> float:
    """The smallest value that at least so many percent of all are not above."""
    return sorted_values[max(0, math.ceil(percent / 100 * len(sorted_values)) - 1)]


def _report(latencies: Sequence[float], *, seconds: float) -> None:
    ordered = sorted(latencies)
    for percent in PERCENTILES:
        report_metric(f"latency p{percent} (ms)", 1000 * percentile(ordered, percent))
    report_metric("requests/s", len(ordered) / seconds)
