"""Pure part of the training bench: whether losses differ by more than they do from seed to seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from rates import format_cells

EAGER_BF16 = "autocast"
"""The peer that others are held against: the program edited by hand to compute its loss under bf16 autocast."""

NOISES = 2.0
"""A mean within so many standard deviations of that peer's losses is no different."""

Losses = Mapping[str, Mapping[str, Sequence[float]]]
"""Model -> peer -> loss of each seed."""

Compared = dict[str, "float | bool"]


def compare_losses(losses: Losses) -> dict[str, dict[str, Compared]]:
    """Model -> peer -> mean and deviation of its losses, and whether the mean is within the noise of eager bf16.

    `noises` is the difference of the means in standard deviations of eager bf16's losses; those two are left out
    without at least two losses of it.
    """
    compared: dict[str, dict[str, Compared]] = {}
    for model, by_peer in losses.items():
        eager = by_peer.get(EAGER_BF16, ())
        compared[model] = {peer: _compare(values, eager) for peer, values in by_peer.items()}
    return compared


def _compare(values: Sequence[float], eager: Sequence[float]) -> Compared:
    mean = statistics.fmean(values)
    result: Compared = {"mean": mean}
    if (deviation := _deviation(values)) is not None:
        result["deviation"] = deviation
    if noise := _deviation(eager):
        noises = (mean - statistics.fmean(eager)) / noise
        result |= {"noises": noises, "within_noise": abs(noises) <= NOISES}
    return result


def _deviation(values: Sequence[float]) -> float | None:
    """Standard deviation; None for fewer than two values or where one is no number."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def format_losses(losses: Losses, steps: int) -> str:
    cells = {
        model: {peer: _loss_cell(compared) for peer, compared in by_peer.items()}
        for model, by_peer in compare_losses(losses).items()
    }
    noise = f"deviations are those of {EAGER_BF16} from seed to seed; within {NOISES:g} is within the noise"
    return f"{format_cells(f'mean loss after {steps} steps', cells)}\n{noise}"


def _loss_cell(compared: Compared) -> str:
    deviation = f" ±{compared['deviation']:.4f}" if "deviation" in compared else ""
    verdict = f" ({compared['noises']:+.1f} deviations)" if "noises" in compared else ""
    return f"{compared['mean']:.4f}{deviation}{verdict}"
