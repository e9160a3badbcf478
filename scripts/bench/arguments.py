"""Types of command-line arguments that several benches share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def comma_separated(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """An argument type: a comma-separated list of some of these names.

    Raises: ArgumentTypeError (from the returned function) for other names.
    """

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)} (known: {', '.join(names)})")
        return chosen

    return parse


def at_least_one(text: str) -> int:
    """An argument type: an integer of at least 1. Raises: ArgumentTypeError, ValueError."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {number}")
    return number
