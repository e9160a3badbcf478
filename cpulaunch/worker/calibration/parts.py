"""The measurements: each runs a torch operation for a fraction of a second and returns its best rate or median time."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 0.3
"""For one measurement, after its first calls; an operation that takes longer is called three times."""
SIZE = 1536
"""Rows and columns of the matrices: three of them in fp32 exceed an L2 cache, and a product takes milliseconds."""
READ_BYTES = 1 << 28
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


def _products(first: torch.Tensor, second: torch.Tensor, multiply: Callable[..., torch.Tensor]) -> float:
    with torch.no_grad():
        return 2e-9 * SIZE**3 / min(_times(lambda: multiply(first, second)))


def fp32_products() -> float:
    """GFLOP/s of products of fp32 matrices."""
    return _products(torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE), torch.mm)


def bf16_products() -> float:
    """GFLOP/s of products of bf16 matrices."""
    first, second = (torch.rand(SIZE, SIZE).to(torch.bfloat16) for _ in range(2))
    return _products(first, second, torch.mm)


def int8_products() -> float:
    """GOP/s of products of int8 matrices, summed in int32."""
    first, second = (torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8) for _ in range(2))
    return _products(first, second, torch._int_mm)


def read_bandwidth() -> float:
    """GB/s at which the threads read memory that no cache holds, in a sum."""
    data = torch.ones(READ_BYTES // 4)
    return 1e-9 * READ_BYTES / min(_times(lambda: data.sum()))


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


PARTS: dict[str, tuple[str, Callable[[], float]]] = {
    "fp32": ("products", fp32_products),
    "bf16": ("products", bf16_products),
    "int8": ("products", int8_products),
    "read": ("read bandwidth", read_bandwidth),
    "allocation": ("allocation", allocation),
    "parallel": ("parallel operation", parallel_operation),
}
"""By name: the kind of the figure, and the function that measures it."""
