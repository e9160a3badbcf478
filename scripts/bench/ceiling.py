#!/usr/bin/env python3
"""Print the rate of the fastest square matrix product on all usable cores: `fp32: 200.00 GFLOP/s`, `bf16: …`."""

import argparse
import time

import torch

SIZES = (256, 512, 1024, 2048, 3072)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def best_gflop_per_second(dtype: torch.dtype, seconds: float) -> float:
    """GFLOP/s of the fastest matrix product of any size; larger ones are left out where one would take 10 `seconds`.

    Processors without bf16 arithmetic reach a thousandth of the others' rate with it.
    """
    rates: list[float] = []
    for size in SIZES:
        if rates and 2 * size**3 / 1e9 / rates[-1] > 10 * seconds:
            break
        rates.append(_gflop_per_second(size, dtype, seconds))
    return max(rates)


def _gflop_per_second(size: int, dtype: torch.dtype, seconds: float) -> float:
    """GFLOP/s of the fastest product of two square matrices within `seconds`, after one unmeasured product."""
    torch.manual_seed(0)
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    result = torch.mm(left, right)
    fastest = float("inf")
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        torch.mm(left, right, out=result)
        fastest = min(fastest, time.perf_counter() - begin)
    return 2 * size**3 / fastest / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each size and precision")
    options = parser.parse_args()
    for name, dtype in DTYPES.items():
        print(f"{name}: {best_gflop_per_second(dtype, options.seconds):.2f} GFLOP/s", flush=True)


if __name__ == "__main__":
    main()
