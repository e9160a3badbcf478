"""How fast matrix products of a low precision are on this machine, against those in fp32."""

from __future__ import annotations

from time import perf_counter

import torch

SIZE = 256
CALLS = 5


def slowdowns() -> dict[str, float]:
    """By type: the time of a product divided by that of one in fp32. Effect: computes for milliseconds."""
    fp32 = _seconds(torch.float32)
    found = {}
    for name, type_ in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        try:
            found[name] = _seconds(type_) / fp32
        except RuntimeError:  # No kernel for this type.
            continue
    return found


def _seconds(type_: torch.dtype) -> float:
    """The best time of a product."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        first, second = (torch.ones(SIZE, SIZE, dtype=type_, device="cpu") for _ in range(2))
        torch.mm(first, second)
        times = []
        for _ in range(CALLS):
            start = perf_counter()
            torch.mm(first, second)
            times.append(perf_counter() - start)
        return min(times)
