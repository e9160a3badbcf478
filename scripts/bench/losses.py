"""Pure part of the training bench: whether losses differ by more than they vary between seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from rates import format_cells

EAGER_BF16 = "autocast"
"""The reference peer: the program edited by hand to compute its loss under bf16 autocast."""

MAX_DEVIATIONS = 2.0
"""Means that differ by no more standard deviations of the reference peer's losses count as equal."""

Losses = Mapping[str, Mapping[str, Sequence[float]]]
"""Model -> peer -> one loss for each seed."""

Compared = dict[str, "float | bool"]


def compare_losses(losses: Losses) -> dict[str, dict[str, Compared]]:
    """Model -> peer -> mean and standard deviation of its losses, and whether the mean is within the noise.

    `noises` is the difference from the mean of eager bf16, in standard deviations of the losses of eager bf16; it and
    `within_noise` are absent if there are fewer than two such losses.
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
        deviations = (mean - statistics.fmean(eager)) / noise
        result |= {"noises": deviations, "within_noise": abs(deviations) <= MAX_DEVIATIONS}
    return result


def _deviation(values: Sequence[float]) -> float | None:
    """Standard deviation; None for fewer than two values or if one is not finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def format_losses(losses: Losses, steps: int) -> str:
    cells = {
        model: {peer: _loss_cell(compared) for peer, compared in by_peer.items()}
        for model, by_peer in compare_losses(losses).items()
    }
    noise = f"deviations: standard deviations of {EAGER_BF16} between seeds; up to {MAX_DEVIATIONS:g} is noise"
    return f"{format_cells(f'mean loss after {steps} steps', cells)}\n{noise}"


def _loss_cell(compared: Compared) -> str:
    deviation = f" ±{compared['deviation']:.4f}" if "deviation" in compared else ""
    verdict = f" ({compared['noises']:+.1f} deviations)" if "noises" in compared else ""
    return f"{compared['mean']:.4f}{deviation}{verdict}"
