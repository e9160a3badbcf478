"""The measurements: each runs a torch operation for a fraction of a second and returns its best rate or median time."""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter

import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 0.3
"""For one measurement, after its first calls; an operation that takes longer is called three times."""
SIZES = (256, 1536)
"""Rows and columns of the matrices. Three large ones in fp32 exceed an L2 cache, and a product takes milliseconds; on a
processor without instructions for a type it takes seconds, and is as slow in small ones.
"""
SMALL = 1 << 16
"""Elements of an operation that torch divides among its threads, and whose work takes microseconds."""
BLOCKS = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 3 << 20)
"""Elements of the tensors that the allocator makes and frees: small ones, and such that the C library maps."""


def _times(call: Callable[[], object], *, batch: int = 1) -> list[float]:
    """Seconds of one call, for SECONDS; at least three times."""
    call()
    call()
    found: list[float] = []
    end = perf_counter() + SECONDS
    while len(found) < 3 or perf_counter() < end:
        start = perf_counter()
        for _ in range(batch):
            call()
        found.append((perf_counter() - start) / batch)
    return found


def _products(make: Callable[[int], torch.Tensor], multiply: Callable[..., torch.Tensor]) -> float:
    """The best rate of products of square matrices, which `make` makes, in 1e9 operations per second."""
    best = 0.0
    with torch.no_grad():
        for size in SIZES:
            operations = 2e-9 * size**3
            if best and operations / best > SECONDS:
                break
            best = max(best, operations / min(_times(partial(multiply, make(size), make(size)))))
    return best


def fp32_products() -> float:
    """GFLOP/s of products of fp32 matrices."""
    return _products(lambda size: torch.rand(size, size), torch.mm)


def bf16_products() -> float:
    """GFLOP/s of products of bf16 matrices."""
    return _products(lambda size: torch.rand(size, size).to(torch.bfloat16), torch.mm)


def int8_products() -> float:
    """GOP/s of products of int8 matrices, summed in int32."""
    return _products(lambda size: torch.randint(-127, 128, (size, size), dtype=torch.int8), torch._int_mm)


def read_bandwidth(size_bytes: int) -> float:
    """GB/s at which the threads read so much memory, which is more than caches hold, in a sum."""
    data = torch.ones(size_bytes // 4)
    return 1e-9 * size_bytes / min(_times(lambda: data.sum()))


def allocation() -> float:
    """Median microseconds to make, fill and free a tensor, over several sizes."""

    def churn() -> None:
        for size in BLOCKS:
            torch.ones(size)

    return 1e6 * median(_times(churn)) / len(BLOCKS)


def parallel_operation() -> float:
    """Median microseconds of an addition that is divided among all threads and has next to nothing to do."""
    data, result = torch.ones(SMALL), torch.empty(SMALL)
    return 1e6 * median(_times(lambda: torch.add(data, data, out=result), batch=100))


def parts(*, read_bytes: int) -> dict[str, tuple[str, Callable[[], float]]]:
    """By name: the kind of the figure, and the function that measures it."""
    return {
        "fp32": ("products", fp32_products),
        "bf16": ("products", bf16_products),
        "int8": ("products", int8_products),
        "read": ("read bandwidth", partial(read_bandwidth, read_bytes)),
        "allocation": ("allocation", allocation),
        "parallel": ("parallel operation", parallel_operation),
    }
