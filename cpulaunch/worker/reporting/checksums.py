"""Checksums of a program's outputs: enough of them to compare two runs exactly, or within an error.

Each tensor, text and vector of numbers in a value is a part: its place, type and shape, and a digest for exact
comparisons. A few numbers are kept as they are. Many floats have a sample, the largest value, and for each block of
rows the largest value, the norm and projections. A projection multiplies all elements with signs that are the same in
every run; the mean of the squared differences of two outputs' projections estimates the squared norm of their
difference. Source: Achlioptas, Database-friendly random projections (2003).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, TypeAlias

    Facts: TypeAlias = "dict[str, Any]"

MAX_PARTS = 64
SAMPLED = 64
PROJECTIONS = 8
SEED = 20260101
CHUNK = 1 << 20
"""Elements that are in float64 at a time, in the same memory: in smaller steps threads wait for one another."""
ROW = 1 << 10
BLOCKS = 128
"""An error of a few rows is measured by their block, not by the whole tensor."""
ALL_BLOCKS = 2048
"""Of all parts of a value together: an event with more would be too long to be read."""
DIGITS = 10
"""Of what is kept of a block: enough for the rounding of float64, and short in a report."""
LARGEST_WHOLE = 1 << 63
"""Larger integers are written as texts, which every reader of JSON takes."""
BUFFERS = {"f": "float32", "d": "float64"} | dict.fromkeys("bBhHiIlLqQ?", "int")
"""Types of buffers by their format. Source: the documentation of Python's module struct."""
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it, modulo 2^64, are spread evenly. Source: Knuth, TAOCP 6.4."""


def checksum_parts(value: object) -> list[dict[str, Any]]:
    """The parts of a value, which stays as it is. Raises: TypeError or ValueError."""
    parts: list[dict[str, Any]] = []
    for place, part in _leaves(value, ""):
        if len(parts) >= MAX_PARTS:
            raise ValueError(f"a checksum has at most {MAX_PARTS} tensors, texts and vectors; give them several names")
        parts.append({"place": place, **_facts(part)})
    return _with_fewer_blocks(parts)


def _with_fewer_blocks(parts: list[Facts]) -> list[Facts]:
    """The parts, with so many neighbouring blocks of each joined that all together have about ALL_BLOCKS at most."""
    count = -(-sum(len(part.get("blocks", ())) for part in parts) // ALL_BLOCKS)
    if count <= 1:
        return parts
    return [part | {"blocks": _joined(part["blocks"], count)} if "blocks" in part else part for part in parts]


def _joined(blocks: list[list[float]], count: int) -> list[list[float]]:
    """Blocks of so many blocks each."""
    import math

    joined = []
    for start in range(0, len(blocks), count):
        largest, norms, *sums = zip(*blocks[start : start + count], strict=True)
        joined.append([max(largest), math.hypot(*norms), *map(math.fsum, sums)])
    return _rounded(joined)


def positions(count: int) -> list[int]:
    """The positions of the sampled elements: all of few, else an even spread of SAMPLED."""
    if count <= SAMPLED:
        return list(range(count))
    return sorted({((number * GOLDEN) % (1 << 64)) * count >> 64 for number in range(1, SAMPLED + 1)})


def _leaves(value: Any, place: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors, texts and vectors in a value, each with its place; of a mapping in the order of its keys' texts."""
    if depth > 20:
        raise ValueError("a checksum's value is nested too deeply")
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{place}[{str(key)[:80]!r}]", depth + 1)
    elif (isinstance(value, list | tuple) and not _is_vector(value)) or _is_nested(value):
        for number, each in enumerate(value.unbind() if _is_nested(value) else value):
            yield from _leaves(each, f"{place}[{number}]", depth + 1)
    else:
        yield place, value


def _is_nested(value: Any) -> bool:
    """Whether it is a nested tensor, whose parts have shapes of their own."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.is_nested


def _is_vector(value: Sequence[object]) -> bool:
    return bool(value) and all(isinstance(each, int | float) for each in value)


def _facts(value: Any) -> Facts:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_facts(torch, value)
    if value is None or isinstance(value, str | bytes):
        data = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
        return {"type": type(value).__name__, "shape": [len(data)], "digest": _digest(data)}
    if isinstance(value, int | float):
        return _number_facts([value], shape=[])
    if isinstance(value, list | tuple):
        return _number_facts(value, shape=[len(value)])
    return _array_facts(torch, value)


def _array_facts(torch: Any, value: Any) -> Facts:
    """The facts of what has the buffer protocol, such as an array of numpy; or of a number of another type."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return _numpy_facts(torch, numpy, value)
    try:
        view = memoryview(value)
    except TypeError:
        if not hasattr(type(value), "__float__"):
            raise TypeError(f"a checksum is of tensors, numbers and texts, not of {type(value).__name__}") from None
        return _number_facts([_float(value)], shape=[])
    letter: Any = view.format.strip("@")
    if letter not in BUFFERS:
        raise TypeError(f"a checksum is of arrays of numbers, not of format {view.format!r}")
    numbers = memoryview(view.tobytes()).cast(letter).tolist()
    return _vector_facts(numbers, shape=list(view.shape or ()), kind=BUFFERS[letter])


def _numpy_facts(torch: Any, numpy: Any, value: Any) -> Facts:
    """The facts of an array of any strides and byte order."""
    if value.dtype.kind not in "biufc":
        raise TypeError(f"a checksum is of arrays of numbers, not of {value.dtype}")
    dense = numpy.array(value, dtype=value.dtype.newbyteorder("="), order="C")
    if dense.dtype.char in "gG":  # Long double, which neither torch nor Python has.
        dense = dense.astype("c16" if dense.dtype.kind == "c" else "f8")
    if torch is not None:
        return _tensor_facts(torch, torch.from_numpy(dense))
    flat = dense.reshape(-1)
    flat = flat.view(flat.real.dtype) if dense.dtype.kind == "c" else flat
    return _vector_facts(flat.tolist(), shape=list(value.shape), kind=dense.dtype.name)


def _digest(data: Any) -> str:
    from hashlib import blake2b

    return blake2b(data, digest_size=16).hexdigest()


def _float(value: Any) -> float:
    """The value as a float: infinite if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _plain(number: Any) -> Any:
    """The number as JSON has it: as a text if it is not finite, or a very large integer."""
    if isinstance(number, int):
        return int(number) if abs(number) < LARGEST_WHOLE else hex(number)
    return float(number) if number - number == 0 else str(float(number))


def _number_facts(values: Sequence[Any], *, shape: list[int]) -> Facts:
    """The facts of Python's numbers, which may be results of any precision. A few are kept."""
    whole = all(isinstance(each, int) for each in values)
    if whole or len(values) > SAMPLED:
        return _vector_facts(values, shape=shape, kind="int" if whole else "float")
    numbers = [_plain(each) for each in values]
    return {"type": "float", "shape": shape, "digest": _digest(repr(numbers).encode()), "numbers": numbers}


def _vector_facts(values: Sequence[Any], *, shape: list[int], kind: str) -> Facts:
    """The facts of numbers without torch."""
    import struct

    chosen = positions(len(values))
    if all(isinstance(each, int) for each in values):
        data = ",".join(f"{each:x}" for each in values).encode()
        return {"type": kind, "shape": shape, "digest": _digest(data), "sample": [_plain(values[n]) for n in chosen]}
    numbers = [_float(each) for each in values]
    finite = [each if each - each == 0 else 0.0 for each in numbers]
    odd = [(n, str(each)) for n, each in enumerate(numbers) if each - each != 0]
    nan = sum(text == "nan" for _, text in odd)
    return {
        "type": kind,
        "shape": shape,
        "digest": _digest(struct.pack(f"<{len(numbers)}d", *numbers)),
        "sample": [finite[each] for each in chosen],
        "not_finite": [nan, len(odd) - nan],
        "not_finite_places": _digest(repr(odd).encode()) if odd else "",
        "largest": max(map(abs, finite), default=0.0),
        "blocks": _vector_blocks(finite),
    }


def _vector_blocks(values: Sequence[float]) -> list[list[float]]:
    """What `_blocks` is for a tensor; it takes other signs, as numbers of one program come the same way in each run."""
    import math
    from operator import mul
    from random import Random

    random = Random(SEED)
    unit = max(map(abs, values), default=0.0) or 1.0
    size = ROW * _rows_per_block(len(values))
    blocks = []
    for start in range(0, len(values), size):
        block = [each / unit for each in values[start : start + size]]
        signs = [random.choices((-1.0, 1.0), k=len(block)) for _ in range(PROJECTIONS)]
        sums = [math.fsum(map(mul, row, block)) for row in signs]
        blocks.append([max(map(abs, block)), math.hypot(*block), *sums])
    return _rounded(blocks)


def _rows_per_block(count: int) -> int:
    """How many rows of ROW elements a block has."""
    return max(1, -(-count // (ROW * BLOCKS)))


def _rounded(blocks: list[list[float]]) -> list[list[float]]:
    return [[float(f"{each:.{DIGITS}g}") for each in block] for block in blocks]


def _tensor_facts(torch: Any, tensor: Any) -> Facts:
    try:
        return _facts_in_memory(torch, tensor)
    except RuntimeError as error:  # Of a tensor without values (meta), or of a type that torch cannot convert.
        reason = str(error).partition("\n")[0]
        raise TypeError(f"a checksum is of tensors with values, not of this one: {reason}") from None


def _facts_in_memory(torch: Any, tensor: Any) -> Facts:
    with torch.no_grad():
        flat = _flat(torch, tensor)
        facts = {
            "type": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "digest": _digest(_memory(flat)),
        }
        chosen = flat[torch.tensor(positions(flat.numel()), dtype=torch.int64, device="cpu")]
        if not flat.is_floating_point():
            return facts | {"sample": [_plain(int(each)) for each in chosen.tolist()]}
        finite = torch.nan_to_num(chosen.to(torch.float64), 0.0, 0.0, 0.0)
        return facts | {"sample": finite.tolist()} | _float_facts(torch, flat)


def _flat(torch: Any, tensor: Any) -> Any:
    """The elements in a row, dense and in this machine's memory; of a distributed tensor those of this rank."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor = tensor.detach()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.to("cpu").contiguous().reshape(-1)


def _memory(flat: Any) -> Any:
    """The bytes of a tensor, which is not copied and has to stay; it has no numpy, which may not be installed.

    Raises: RuntimeError for a subclass of tensors that consists of other ones.
    """
    import ctypes

    count, address = flat.numel() * flat.element_size(), flat.data_ptr()
    if count and not address:
        raise RuntimeError(f"{type(flat).__name__} has no memory of its own")
    return (ctypes.c_char * count).from_address(address) if count else b""


def _chunks(flat: Any) -> Iterator[Any]:
    """The elements, so many at a time; views of them."""
    for start in range(0, flat.numel(), CHUNK):
        yield flat[start : start + CHUNK]


def _float_facts(torch: Any, flat: Any) -> Facts:
    """The places of elements that are not finite, and the sizes and projections of the others."""
    largest, counts, places = _largest(torch, flat), [0, 0], ""
    is_finite = largest is not None
    if largest is None:
        largest, counts, places = _not_finite(torch, flat)
    return {
        "not_finite": counts,
        "not_finite_places": places,
        "largest": largest,
        "blocks": _blocks(torch, flat, largest or 1.0, is_finite=is_finite),
    }


def _largest(torch: Any, flat: Any) -> float | None:
    """The largest absolute value; None if an element is not finite."""
    is_wide = flat.dtype in (torch.float32, torch.float64)
    largest = 0.0
    for chunk in _chunks(flat):
        low, high = map(float, (chunk if is_wide else chunk.to(torch.float32)).aminmax())
        if low - low != 0 or high - high != 0:
            return None
        largest = max(largest, -low, high)
    return largest


def _not_finite(torch: Any, flat: Any) -> tuple[float, list[int], str]:
    """The largest absolute value of finite elements, how many are NaN and infinite, and a digest of where these are."""
    from hashlib import blake2b

    places = blake2b(digest_size=16)
    nan, infinite, largest = 0, 0, 0.0
    for number, each in enumerate(_chunks(flat)):
        chunk = each.to(torch.float64)
        largest = max(largest, float(torch.nan_to_num(chunk, 0.0, 0.0, 0.0).abs().max()))
        if not bool(chunk.isfinite().all()):
            nan += int(chunk.isnan().sum())
            infinite += int(chunk.isinf().sum())
            kinds = (chunk.isnan() + 2 * chunk.isposinf() + 3 * chunk.isneginf()).to(torch.int8)
            places.update(number.to_bytes(8, "big"))
            places.update(_memory(kinds))
    return largest, [nan, infinite], places.hexdigest()


def _blocks(torch: Any, flat: Any, unit: float, *, is_finite: bool) -> list[list[float]]:
    """Of each block the largest value, the norm and the projections, by `unit`, the largest value of all.

    Elements that are not finite count as zeros.
    """
    generator = torch.Generator(device="cpu").manual_seed(SEED)

    def signs(count: int) -> Any:
        drawn = torch.randint(0, 2, (count, PROJECTIONS), generator=generator, dtype=torch.int8, device="cpu")
        return drawn.to(torch.float64) * 2 - 1

    columns = signs(ROW)
    facts = []
    for rows in _rows(torch, flat, unit, is_finite=is_finite):
        largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
        squares = torch.linalg.vector_norm(rows, dim=1, keepdim=True).square()
        facts.append(torch.cat([largest, squares, (rows @ columns) * signs(rows.shape[0])], 1))
    if not facts:
        return []
    found = []
    for block in torch.cat(facts).split(_rows_per_block(flat.numel())):
        sums = block.sum(0)
        found.append([float(block[:, 0].max()), float(sums[1].sqrt()), *sums[2:].tolist()])
    return _rounded(found)


def _rows(torch: Any, flat: Any, unit: float, *, is_finite: bool) -> Iterator[Any]:
    """The elements by `unit` in rows of float64, the last one filled with zeros; each time in the same memory."""
    most = min(CHUNK, flat.numel() + -flat.numel() % ROW)
    memory = torch.empty(most, dtype=torch.float64, device="cpu")
    for chunk in _chunks(flat):
        count = chunk.numel()
        size = count + -count % ROW
        memory[count:size] = 0.0
        values = memory[:count].copy_(chunk)
        if not is_finite:
            values.nan_to_num_(0.0, 0.0, 0.0)
        values.div_(unit)
        yield memory[:size].reshape(-1, ROW)
