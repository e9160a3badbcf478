"""Pure part of the bench of overlap: CPUs for computing and communicating, the batch, what a machine allows, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from interleave import paired_ratios, spread
from report import format_spread, format_table

LARGEST_BATCH = 4096
HEADER = (
    "batch",
    "backward, ms",
    "communication, ms",
    "backward / communication",
    "step, ms",
    "step / (compute + communication)",
)


def shared_cpus(cpus: Sequence[int], ranks: int) -> list[list[int]]:
    """Rank -> the CPU on which it computes and communicates; several ranks have one where there are too few."""
    return [[cpus[rank % len(cpus)]] for rank in range(ranks)]


def own_cpus(cpus: Sequence[int], ranks: int) -> tuple[list[list[int]], list[int]] | None:
    """Rank -> its CPU for computing, and rank -> the one for communicating; None if there are not two for each."""
    if len(cpus) < 2 * ranks:
        return None
    return [[cpus[2 * rank]] for rank in range(ranks)], [cpus[2 * rank + 1] for rank in range(ranks)]


def balanced_batch(backward_seconds: Mapping[int, float], communication_seconds: float) -> int:
    """The batch whose backward takes as long as the communication, on a line through two measured batches."""
    (small, low), (large, high) = sorted(backward_seconds.items())
    slope = (high - low) / (large - small)
    if slope <= 0:
        return large
    return max(1, min(LARGEST_BATCH, round(small + (communication_seconds - low) / slope)))


def what_cpus_allow(cpus: int, ranks: int) -> str:
    """Whether communication can go on beside computing on so many CPUs."""
    if cpus >= 2 * ranks:
        return f"{ranks} ranks on {cpus} CPUs: each can have a CPU for communication beside the one it computes on"
    needed = f"for more, {ranks} ranks need {2 * ranks} CPUs"
    if cpus >= ranks:
        return (
            f"{ranks} ranks on {cpus} CPUs: each copies and adds on the CPU it computes on, so only waiting can be "
            f"hidden: a ratio near 1 is what this machine allows; {needed}"
        )
    return f"{ranks} ranks on {cpus} CPUs: ranks share CPUs, and nothing can be hidden; {needed}"


def row(name: str, measured: Mapping[str, Any]) -> list[str]:
    times = measured["times"]
    compute, communication = times["compute"], times["communication"]
    backward = [one - other for one, other in zip(compute, times["forward"], strict=True)]
    sums = [one + other for one, other in zip(compute, communication, strict=True)]
    parts = [format_spread(spread([1e3 * each for each in part])) for part in (backward, communication, times["step"])]
    balance, hidden = paired_ratios(backward, communication), paired_ratios(times["step"], sums)
    parts.insert(2, format_spread(spread(balance)))
    return [name, str(measured["batch"]), *parts, format_spread(spread(hidden))]


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Compute is forward and backward; a step is both with their communication."""
    rows = [row(name, measured) for name, measured in results.items()]
    least = [name for name, measured in results.items() if measured["batch"] == 1]
    said = [f"{name}: backward takes no less than this, with a batch of one" for name in least]
    return "\n".join([format_table(["compute = forward + backward", *HEADER], rows), *said])
