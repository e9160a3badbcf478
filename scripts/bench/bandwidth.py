#!/usr/bin/env python3
"""Read a large tensor with all threads and print `memory: 12.34 GB/s`, the fastest pass of several reductions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from pacing import count_steps

BYTES = 1 << 29


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each measured window")
    options = parser.parse_args()
    values = torch.ones(BYTES // 4)
    matrix, vector = values.view(-1, 4096), torch.ones(4096)
    shortest = float("inf")

    def timed(step: Callable[[], object]) -> None:
        nonlocal shortest
        shortest = min(shortest, count_steps(step, 0.0)[1])

    for step in (values.sum, values.amax, lambda: torch.mv(matrix, vector)):
        step()
        count_steps(partial(timed, step), options.seconds)
    print(f"memory: {BYTES / shortest / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
