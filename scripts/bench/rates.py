"""Pure part of the throughput bench: from the printed lines of the copies to ratios and a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from interleave import geometric_mean, paired_ratios, spread
from report import format_spread, format_table

REFERENCES = ("python", "run_cpu")

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Model -> peer -> samples/s of each round."""


def parse_rates(output: str) -> list[float]:
    """The samples/s of every copy's last line, whatever prefix a launcher put before it."""
    return [float(rate) for rate in re.findall(r"\b\w+: ([0-9.]+) samples/s\s*$", output, flags=re.MULTILINE)]


def median_ratios(samples: Samples, reference: str) -> dict[str, dict[str, float]]:
    """Model -> peer -> median over rounds of the peer's rate over the reference's in the same round."""
    return {
        model: {peer: spread(paired_ratios(rates, by_peer[reference])).median for peer, rates in by_peer.items()}
        for model, by_peer in samples.items()
    }


def geometric_means(ratios: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Peer -> geometric mean over models."""
    peers = next(iter(ratios.values()))
    return {peer: geometric_mean([by_peer[peer] for by_peer in ratios.values()]) for peer in peers}


def summarise(samples: Samples) -> dict[str, object]:
    """Samples, spreads, ratios to the measured references and their geometric means, as JSON data."""
    ratios = {reference: median_ratios(samples, reference) for reference in measured_references(samples)}
    return {
        "samples": samples,
        "summary": {
            model: {peer: spread(rates).to_json() for peer, rates in by_peer.items()}
            for model, by_peer in samples.items()
        },
        "ratios": ratios,
        "geometric_means": {reference: geometric_means(by_model) for reference, by_model in ratios.items()},
    }


def measured_references(samples: Samples) -> list[str]:
    measured = next(iter(samples.values()))
    return [reference for reference in REFERENCES if reference in measured]


def format_samples(samples: Samples) -> str:
    """A row per peer and a column per model; below, the ratios to each reference and their geometric means."""
    peers = list(next(iter(samples.values())))
    rows = [[peer, *(format_spread(spread(by_peer[peer])) for by_peer in samples.values())] for peer in peers]
    tables = [format_table(["samples/s: median (min-max)", *samples], rows)]
    references = measured_references(samples)
    return "\n\n".join(tables + [_format_ratios(median_ratios(samples, name), name) for name in references])


def _format_ratios(ratios: Mapping[str, Mapping[str, float]], reference: str) -> str:
    means = geometric_means(ratios)
    rows = [[peer, *(f"{row[peer]:.2f}" for row in ratios.values()), f"{mean:.2f}"] for peer, mean in means.items()]
    return format_table([f"times {reference}", *ratios, "geometric mean"], rows)
