"""Argument types that both benches use."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def some_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Parser of a comma-separated list that accepts these names only."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)} (known: {', '.join(names)})")
        return chosen

    return parse


def at_least_one(text: str) -> int:
    """Parser of a count."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {number}")
    return number
