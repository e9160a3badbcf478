"""Pure part of scripts/bench/programs: ratios of the variants of each program, and tables of them.

A variant that failed for a program has no samples for it: its cell is `-`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interleave import Spread, geometric_mean, median_interval, paired_ratios, spread
from report import format_spread, format_table
from variants import BASE, CONTROL

LOWEST_RATIO = 0.98
"""A variant below this share of the rate of `environment` is slower than a setting may be; noise is above it."""

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Program -> variant -> one value for each round."""

Spreads = Mapping[str, Mapping[str, Spread]]
"""Program -> variant -> median and range over rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A program that is slower under a variant than under another one."""

    program: str
    variant: str
    ratio: Spread

    def __str__(self) -> str:
        return f"{self.program} under {self.variant} {format_spread(self.ratio)}"


def ratios_to(samples: Samples, base: str) -> dict[str, dict[str, Spread]]:
    """Program -> variant -> its values divided by those of `base` in the same round; programs without `base` lack."""
    return {
        program: {
            variant: spread(paired_ratios(values, by_variant[base]))
            for variant, values in by_variant.items()
            if len(values) == len(by_variant[base])
        }
        for program, by_variant in samples.items()
        if by_variant.get(base)
    }


def spreads(samples: Samples) -> dict[str, dict[str, Spread]]:
    """Program -> variant -> median and range."""
    return {
        program: {variant: spread(values) for variant, values in by_variant.items() if values}
        for program, by_variant in samples.items()
    }


def geometric_means(ratios: Spreads) -> dict[str, float]:
    """Variant -> geometric mean of its median ratios over the programs that have one."""
    return {
        variant: geometric_mean([by_variant[variant].median for by_variant in ratios.values() if variant in by_variant])
        for variant in _variants(ratios)
    }


def shortfalls(samples: Samples, base: str = BASE) -> list[Shortfall]:
    """The programs below LOWEST_RATIO of `base`, by median; plain python and the control are not judged."""
    return [
        Shortfall(program=program, variant=variant, ratio=ratio)
        for program, by_variant in ratios_to(samples, base).items()
        for variant, ratio in by_variant.items()
        if ratio.median < LOWEST_RATIO and variant not in ("python", BASE if base == BASE else None, CONTROL)
    ]


def format_rates(samples: Samples, units: Mapping[str, str]) -> str:
    """A table of rates with a row for each program."""
    cells = {name: _texts(by_variant) for name, by_variant in spreads(samples).items()}
    labels = {name: f"{name}, {units[name]}" if name in units else name for name in cells}
    return _format("median (min-max)", {labels[name]: by_variant for name, by_variant in cells.items()})


def format_values(title: str, values: Mapping[str, Mapping[str, float]], form: str) -> str:
    """A table of single values, with a row for each program."""
    return _format(title, {name: {each: form % value for each, value in row.items()} for name, row in values.items()})


def format_ratios(samples: Samples, base: str) -> str:
    """A table of the ratios to a variant, with geometric means; `<` marks those below LOWEST_RATIO."""
    ratios = ratios_to(samples, base)
    low = {(each.program, each.variant) for each in shortfalls(samples, base)}
    cells = {
        program: {
            variant: f"{'<' if (program, variant) in low else ''}{format_spread(ratio)}"
            for variant, ratio in by_variant.items()
        }
        for program, by_variant in ratios.items()
    }
    means = {variant: f"{mean:.2f}{_coverage(ratios, variant)}" for variant, mean in geometric_means(ratios).items()}
    return _format(f"ratio to {base}", cells | {"geometric mean": means})


def _coverage(ratios: Spreads, variant: str) -> str:
    measured = sum(variant in by_variant for by_variant in ratios.values())
    return "" if measured == len(ratios) else f" ({measured} of {len(ratios)})"


def format_bypassed(ratios: Samples) -> str:
    """A table of the ratios to windows of the same process whose calls bypass the plugin."""
    cells = {
        program: {
            variant: f"{found.median:.3f} ({found.smallest:.3f}-{found.largest:.3f})"
            for variant, values in by_variant.items()
            if values
            for found in (median_interval(values),)
        }
        for program, by_variant in ratios.items()
    }
    return _format("ratio to bypassed calls: median (95 % interval)", {name: row for name, row in cells.items() if row})


def format_shortfalls(samples: Samples) -> str:
    """The lists of programs below LOWEST_RATIO of `environment` and, if it was measured, of plain python."""
    return "\n".join(
        f"below {LOWEST_RATIO} of {base}: {'; '.join(map(str, shortfalls(samples, base))) or 'none'}"
        for base in (BASE, "python")
        if base == BASE or ratios_to(samples, base)
    )


def summarise(samples: Samples) -> dict[str, object]:
    """Ratios, geometric means and shortfalls, as JSON data."""
    bases = [base for base in (BASE, "python") if ratios_to(samples, base)]
    ratios = {base: ratios_to(samples, base) for base in bases}
    return {
        "samples": samples,
        "ratios": {
            base: {name: {variant: ratio.to_json() for variant, ratio in row.items()} for name, row in by_name.items()}
            for base, by_name in ratios.items()
        },
        "geometric_means": {base: geometric_means(by_name) for base, by_name in ratios.items()},
        "below": [str(each) for each in shortfalls(samples)],
        "below_python": [str(each) for each in shortfalls(samples, "python")],
    }


def _texts(by_variant: Mapping[str, Spread]) -> dict[str, str]:
    return {variant: format_spread(value) for variant, value in by_variant.items()}


def _variants(by_program: Mapping[str, Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(variant for row in by_program.values() for variant in row))


def _format(title: str, cells: Mapping[str, Mapping[str, str]]) -> str:
    variants = _variants(cells)
    rows = [[name, *(row.get(variant, "-") for variant in variants)] for name, row in cells.items()]
    return format_table([title, *variants], rows)
