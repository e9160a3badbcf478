"""Checksums of a program's outputs: enough of them to compare two runs exactly, or within an error.

Each tensor, text and vector of numbers in a value is a part: its place, type and shape, a digest for exact
comparisons, and for numbers a sample, the largest value, the norm and projections. A projection multiplies all
elements with signs that are the same in every run; the mean of the squared differences of two outputs' projections
estimates the squared norm of their difference. Source: Achlioptas, Database-friendly random projections (2003).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

MAX_PARTS = 64
SAMPLED = 64
PROJECTIONS = 8
SEED = 20260101
CHUNK = 1 << 20
"""Elements that are converted to float64 at a time."""
ROW = 1 << 10
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it, modulo 2^64, are spread evenly. Source: Knuth, TAOCP 6.4."""


def checksum_parts(value: object) -> list[dict[str, Any]]:
    """The parts of a value, which stays as it is. Raises: TypeError or ValueError."""
    parts: list[dict[str, Any]] = []
    for place, part in _leaves(value, ""):
        if len(parts) >= MAX_PARTS:
            raise ValueError(f"a checksum has at most {MAX_PARTS} tensors, texts and vectors; give them several names")
        parts.append({"place": place, **_facts(part)})
    return parts


def positions(count: int) -> list[int]:
    """The positions of the sampled elements: all of few, else an even spread of SAMPLED."""
    if count <= SAMPLED:
        return list(range(count))
    return sorted({((number * GOLDEN) % (1 << 64)) * count >> 64 for number in range(1, SAMPLED + 1)})


def _leaves(value: Any, place: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors, texts and vectors in a value, each with its place."""
    if depth > 20:
        raise ValueError("a checksum's value is nested too deeply")
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], f"{place}[{str(key)[:80]!r}]", depth + 1)
    elif isinstance(value, list | tuple) and not _is_vector(value):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{place}[{number}]", depth + 1)
    else:
        yield place, value


def _is_vector(value: Sequence[object]) -> bool:
    return bool(value) and all(isinstance(each, int | float) for each in value)


def _facts(value: Any) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_facts(torch, value)
    if value is None or isinstance(value, str | bytes):
        data = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
        return {"type": type(value).__name__, "shape": [len(data)], "digest": _digest(data)}
    if isinstance(value, int | float):
        return _vector_facts([value], shape=[])
    if isinstance(value, list | tuple):
        return _vector_facts(value, shape=[len(value)])
    return _array_facts(torch, value)


def _array_facts(torch: Any, value: Any) -> dict[str, Any]:
    """The facts of what has the buffer protocol, such as an array of numpy; or of a number of another type."""
    try:
        view = memoryview(value)
    except TypeError:
        if not hasattr(type(value), "__float__"):
            raise TypeError(f"a checksum is of tensors, numbers and texts, not of {type(value).__name__}") from None
        return _vector_facts([float(value)], shape=[])
    if torch is not None:
        return _tensor_facts(torch, torch.as_tensor(value))
    if not (view.contiguous and view.format.strip("@=<>|") in "bBhHiIlLqQfd?"):
        raise TypeError(f"a checksum is of contiguous arrays of numbers, not of format {view.format!r}")
    letter: Any = view.format.strip("@=<>|")
    flat = view.cast("B").cast(letter)
    return _vector_facts(flat.tolist(), shape=list(view.shape or ()))


def _digest(data: Any) -> str:
    from hashlib import blake2b

    return blake2b(data, digest_size=16).hexdigest()


def _vector_facts(values: Sequence[Any], *, shape: list[int]) -> dict[str, Any]:
    """The facts of Python's numbers."""
    import math
    import struct
    from random import Random

    if all(isinstance(each, int) for each in values):
        sample = [values[each] for each in positions(len(values))]
        data = ",".join(str(int(each)) for each in values).encode()
        return {"type": "int", "shape": shape, "digest": _digest(data), "sample": sample}
    numbers = [float(each) for each in values]
    finite = [each if math.isfinite(each) else 0.0 for each in numbers]
    random = Random(SEED)
    signs = [[random.choice((-1.0, 1.0)) for _ in finite] for _ in range(PROJECTIONS)]
    return {
        "type": "float64",
        "shape": shape,
        "digest": _digest(struct.pack(f"<{len(numbers)}d", *numbers)),
        "sample": [finite[each] for each in positions(len(finite))],
        "not_finite": [sum(map(math.isnan, numbers)), sum(map(math.isinf, numbers))],
        "largest": max(map(abs, finite), default=0.0),
        "norm": math.sqrt(math.fsum(each * each for each in finite)),
        "projections": [math.fsum(sign * each for sign, each in zip(row, finite, strict=True)) for row in signs],
    }


def _tensor_facts(torch: Any, tensor: Any) -> dict[str, Any]:
    with torch.no_grad():
        flat = _flat(torch, tensor)
        facts = {
            "type": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "digest": _digest(_memory(flat)),
        }
        chosen = flat[torch.tensor(positions(flat.numel()), dtype=torch.int64)].to(torch.float64)
        if not flat.is_floating_point():
            return facts | {"sample": chosen.tolist()}
        return facts | {"sample": torch.nan_to_num(chosen, 0.0, 0.0, 0.0).tolist()} | _float_facts(torch, flat)


def _flat(torch: Any, tensor: Any) -> Any:
    """The elements in a row, dense and in this machine's memory."""
    tensor = tensor.detach()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.to("cpu").contiguous().reshape(-1)


def _memory(flat: Any) -> Any:
    """The bytes of a tensor, which is not copied; it has no numpy, which may not be installed."""
    import ctypes

    count = flat.numel() * flat.element_size()
    return (ctypes.c_char * count).from_address(flat.data_ptr()) if count else b""


def _float_facts(torch: Any, flat: Any) -> dict[str, Any]:
    """The largest value, the norm and the projections of the finite elements, in float64 whatever the settings."""
    generator = torch.Generator(device="cpu").manual_seed(SEED)

    def signs(count: int) -> Any:
        drawn = torch.randint(0, 2, (count, PROJECTIONS), generator=generator, dtype=torch.int8)
        return drawn.to(torch.float64) * 2 - 1

    columns = signs(ROW)
    totals, squares = torch.zeros(PROJECTIONS, dtype=torch.float64), 0.0
    largest, nan, infinite = 0.0, 0, 0
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK].to(torch.float64)
        nan += int(chunk.isnan().sum())
        infinite += int(chunk.isinf().sum())
        chunk = torch.nan_to_num(chunk, 0.0, 0.0, 0.0)
        largest = max(largest, float(chunk.abs().max()))
        squares += float(chunk.square().sum())
        rows = torch.nn.functional.pad(chunk, (0, -chunk.numel() % ROW)).reshape(-1, ROW)
        totals += ((rows @ columns) * signs(rows.shape[0])).sum(0)
    return {
        "not_finite": [nan, infinite],
        "largest": largest,
        "norm": squares**0.5,
        "projections": totals.tolist(),
    }
