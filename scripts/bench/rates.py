"""Pure part of the throughput benches: turns the printed lines of the copies into ratios and tables.

A peer that failed on a model has no samples for it: its cell is `-`, and the number of models is given with its mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from interleave import geometric_mean, paired_ratios, spread
from report import format_spread, format_table

COMPILERS = ("inductor", "zentorch")
REFERENCES: Mapping[str, tuple[str, ...]] = {
    "python": ("python",),
    "run_cpu": ("run_cpu",),
    "the best of inductor and zentorch, fp32": COMPILERS,
    "the best of inductor and zentorch, fp32 or bf16": (*COMPILERS, *(f"{name}-bf16" for name in COMPILERS)),
    "the best of ipexrun": ("ipexrun", "ipexrun-1"),
}
"""Reference -> peers; rates are divided by the fastest of these peers in the same round."""

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Model -> peer -> samples/s, one value for each round."""

Ratios = Mapping[str, Mapping[str, float]]
"""Model -> peer -> median ratio."""


def parse_figures(output: str, unit: str) -> list[tuple[str, float]]:
    """Name and value of every line `NAME: VALUE UNIT`; a launcher may have put a prefix before it."""
    value = r"[0-9.]+(?:e[+-]?[0-9]+)?|nan|inf"
    found = re.findall(rf"\b(\w+): ({value}) {re.escape(unit)}\s*$", output, flags=re.MULTILINE)
    return [(name, float(number)) for name, number in found]


def parse_rates(output: str) -> list[float]:
    """Samples/s printed by each copy."""
    return [rate for _, rate in parse_figures(output, "samples/s")]


def peers_of(by_model: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The peers with an entry for at least one model, in order of appearance."""
    return list(dict.fromkeys(peer for by_peer in by_model.values() for peer in by_peer))


def fastest(by_peer: Mapping[str, Sequence[float]], names: Iterable[str]) -> list[float]:
    """Highest samples/s among the named peers, for each round; empty if none was measured."""
    measured = [by_peer[name] for name in names if name in by_peer]
    return [max(rates) for rates in zip(*measured, strict=True)]


def median_ratios(samples: Samples, reference: str) -> dict[str, dict[str, float]]:
    """Model -> peer -> median over rounds of the peer's rate over the reference's in the same round."""
    bases = {model: fastest(by_peer, REFERENCES[reference]) for model, by_peer in samples.items()}
    return {
        model: {peer: spread(paired_ratios(rates, bases[model])).median for peer, rates in by_peer.items()}
        for model, by_peer in samples.items()
        if bases[model]
    }


def geometric_means(ratios: Ratios) -> dict[str, float]:
    """Peer -> geometric mean over the models it has a ratio for."""
    return {peer: geometric_mean(_of_peer(ratios, peer)) for peer in peers_of(ratios)}


def _of_peer(ratios: Ratios, peer: str) -> list[float]:
    return [by_peer[peer] for by_peer in ratios.values() if peer in by_peer]


def measured_references(samples: Samples) -> list[str]:
    """The references with samples for at least one model."""
    return [reference for reference in REFERENCES if median_ratios(samples, reference)]


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


def format_cells(title: str, cells: Mapping[str, Mapping[str, str]], models: Mapping[str, str] | None = None) -> str:
    """A table with a row per peer and a column per model, headed by its name and `models[name]`; `-` without a cell."""
    header = [title, *(f"{model}{(models or {}).get(model, '')}" for model in cells)]
    rows = [[peer, *(by_peer.get(peer, "-") for by_peer in cells.values())] for peer in peers_of(cells)]
    return format_table(header, rows)


def format_samples(samples: Samples) -> str:
    """Tables of the rates, and of the ratios to each reference with their geometric means."""
    cells = {
        model: {peer: format_spread(spread(rates)) for peer, rates in by_peer.items()}
        for model, by_peer in samples.items()
    }
    tables = [format_cells("samples/s: median (min-max)", cells)]
    references = measured_references(samples)
    return "\n\n".join(tables + [_format_ratios(median_ratios(samples, name), name) for name in references])


def _format_ratios(ratios: Ratios, reference: str) -> str:
    cells = {model: {peer: f"{ratio:.2f}" for peer, ratio in by_peer.items()} for model, by_peer in ratios.items()}
    means = {peer: f"{mean:.2f}{_coverage(ratios, peer)}" for peer, mean in geometric_means(ratios).items()}
    return format_cells(f"ratio to {reference}", cells | {"geometric mean": means})


def _coverage(ratios: Ratios, peer: str) -> str:
    measured = len(_of_peer(ratios, peer))
    return "" if measured == len(ratios) else f" ({measured} of {len(ratios)})"
