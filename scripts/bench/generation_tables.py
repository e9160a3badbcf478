"""Pure part of scripts/bench/generation: rates of all runners, compared with python, llama.cpp and the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interleave import paired_ratios, spread
from llama_shape import WEIGHT_BYTES, bytes_per_token
from report import format_spread, format_table

LLAMA_CPP = "llama.cpp "
"""Runners of llama.cpp are named by this and their type of weights."""

TYPES = {
    "python": "f32",
    "environment": "f32",
    "control": "f32",
    "graph": "f32",
    "bf16": "bf16",
    "graph+bf16": "bf16",
    "bf16-weights": "bf16",
    "int8": "q8_0",
    "int4": "q4_0",
    "O2": "f32",
    "O3": "bf16",
    "O4": "q8_0",
    **{f"{LLAMA_CPP}{kind}": kind for kind in WEIGHT_BYTES},
}
"""Runner -> the type of weights that it is compared in."""

Samples = Mapping[str, Sequence[float]]
"""Runner -> tokens/s, one value for each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A runner's tokens/s: median ratios to python's and to llama.cpp's of the same type, and share of the limit."""

    runner: str
    to_python: float | None
    to_llama: float | None
    of_limit: float | None


def limit(runner: str, gigabytes_per_second: float) -> float:
    """Tokens/s of decoding at which the memory gives no more weights, if no cache keeps any of them."""
    return gigabytes_per_second * 1e9 / bytes_per_token(TYPES[runner])


def compare(samples: Samples, gigabytes_per_second: float | None) -> list[Comparison]:
    """A comparison for each runner; without a bandwidth none with the limit."""
    return [
        Comparison(
            runner=runner,
            to_python=_ratio(samples, runner, "python"),
            to_llama=_ratio(samples, runner, f"{LLAMA_CPP}{TYPES[runner]}"),
            of_limit=spread(rates).median / limit(runner, gigabytes_per_second) if gigabytes_per_second else None,
        )
        for runner, rates in samples.items()
    ]


def _ratio(samples: Samples, runner: str, base: str) -> float | None:
    if base not in samples or len(samples[base]) != len(samples[runner]):
        return None
    return spread(paired_ratios(samples[runner], samples[base])).median


def format_samples(title: str, samples: Samples, gigabytes_per_second: float | None = None) -> str:
    """A table with a row for each runner; with a bandwidth also the limit that it sets."""
    header = [title, "type", "median (min-max)", "x python", "x llama.cpp"]
    header += ["memory's limit", "share of it"] if gigabytes_per_second else []
    rows = []
    for each in compare(samples, gigabytes_per_second):
        row = [each.runner, TYPES[each.runner], format_spread(spread(samples[each.runner]))]
        row += ["-" if ratio is None else f"{ratio:.2f}" for ratio in (each.to_python, each.to_llama)]
        if gigabytes_per_second and each.of_limit is not None:
            row += [f"{limit(each.runner, gigabytes_per_second):,.0f}", f"{each.of_limit:.0%}"]
        rows.append(row)
    return format_table(header, rows)
