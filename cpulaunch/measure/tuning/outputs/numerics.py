"""Outputs of two runs compared by their checksums: equal, equal but for rounding, within an error, or wrong."""

from __future__ import annotations

import math
from statistics import median

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any, TypeAlias

    Parts: TypeAlias = "Sequence[Mapping[str, Any]]"
    Outputs: TypeAlias = "Mapping[str, Parts]"

ROUNDING = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float": 1e-4,
    "qint32": 1e-4,
    "float16": 2e-2,
    "complex32": 2e-2,
    "qint8": 2e-2,
    "quint8": 2e-2,
    "bfloat16": 5e-2,
    "float8_e4m3fn": 0.2,
    "float8_e4m3fnuz": 0.2,
    "float8_e5m2": 0.3,
    "float8_e5m2fnuz": 0.3,
    "float8_e8m0fnu": 0.5,
}
"""Errors by which other numbers of threads may change results: about a thousand units in the last place, because layers
add up what each of them rounds; of short types a few units.

"float" is Python's own, in which programs keep results of fp32.
"""
ROUNDING_ELSEWHERE = 0.0
"""For integers and texts."""
MANY = 16
"""So many numbers of one kind are a vector, whose small elements have the errors of its large ones."""
SMALL_BLOCK = 1e-3
"""A block whose norm is a smaller share of the largest block's counts as this."""
SMALLEST = 1e-7
"""Numbers that are smaller count as this: one unit in the last place of 1 in fp32."""


def output_error(reference: Outputs, found: Outputs) -> float:
    """The largest error of any output, relative: infinite where shapes differ, an output is missing, or NaN is new."""
    return max((_named_error(parts, found.get(name)) for name, parts in reference.items()), default=0.0)


def wrong_outputs(reference: Outputs, found: Outputs, *, max_error: float | None) -> str | None:
    """What is wrong with the outputs, in a sentence; None if nothing is.

    `max_error`: the relative error that is allowed; None: what rounding makes of the type.
    """
    for name, parts in reference.items():
        others = found.get(name)
        if others is None:
            return f"output {name!r} was not given to cpulaunch.checksum()"
        if len(parts) != len(others):
            return f"output {name!r} has {len(others)} parts instead of {len(parts)}"
        for part, other in zip(parts, others, strict=True):
            allowed = ROUNDING.get(str(part.get("type")), ROUNDING_ELSEWHERE) if max_error is None else max_error
            error = part_error(part, other)
            if not error <= allowed:
                place = f"{name}{part.get('place', '')}"
                return f"output {place!r} differs by {error_text(error)}; {error_text(allowed)} is allowed"
    return None


def error_text(error: float) -> str:
    """An error for a person."""
    return "more than rounding or precision can explain" if math.isinf(error) else f"{error:.2g}"


def _named_error(parts: Parts, others: Parts | None) -> float:
    if others is None or len(parts) != len(others):
        return math.inf
    return max((part_error(part, other) for part, other in zip(parts, others, strict=True)), default=0.0)


def part_error(part: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The relative error of one tensor, text or vector; of integers the share of elements that differ.

    Single numbers are compared one by one, each by its own size.

    Of floats the largest of three: an element's error by the largest value (of the sample, and of each block's largest
    value), and the norm of the differences by the norm of the values, in any block (from the projections).
    """
    if part.get("shape") != other.get("shape") or part.get("place") != other.get("place"):
        return math.inf
    if part.get("digest", 0) == other.get("digest", 1) and part.get("type") == other.get("type"):
        return 0.0
    try:
        if "numbers" in part:
            return _numbers_error(part["numbers"], other["numbers"])
        if "blocks" in part:
            return _float_error(part, other)
        return _share_of_differences(part, other)
    except (LookupError, TypeError, ValueError, ArithmeticError):  # Any process may have written it.
        return math.inf


def _numbers_error(numbers: Sequence[float | str], others: Sequence[float | str]) -> float:
    """The largest error of any number, each by its own size; of whole numbers the share that differs.

    Of many numbers those that are small among them, as of a difference of large ones, count as the lower quartile.
    Texts stand for numbers that are not finite.
    """
    pairs = list(zip(numbers, others, strict=True))
    whole = [pair for pair in pairs if all(isinstance(each, int) for each in pair)]
    broken = [pair for pair in pairs if not all(isinstance(each, int) for each in pair)]
    share = sum(a != b for a, b in whole) / max(1, len(whole))
    sizes = sorted(abs(float(a)) for a, _ in broken if not isinstance(a, str))
    least = max(SMALLEST, sizes[len(sizes) // 4] if len(sizes) >= MANY else 0.0)
    errors = (abs(a - b) / max(abs(a), abs(b), least) for a, b in broken if a != b)  # type: ignore[operator,arg-type]
    return max(share, max(errors, default=0.0))


def _float_error(part: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    for name in ("not_finite", "not_finite_places"):
        if part[name] != other[name]:
            return math.inf
    own, others = float(part["largest"]), float(other["largest"])
    scale = max(own, others)
    if not scale:
        return 0.0
    errors = [abs(own - others) / scale]
    errors += [abs(a / scale - b / scale) for a, b in zip(part["sample"], other["sample"], strict=True)]
    errors += _block_errors(_scaled(part["blocks"], own / scale), _scaled(other["blocks"], others / scale))
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _scaled(blocks: Sequence[Sequence[float]], factor: float) -> list[list[float]]:
    return [[each * factor for each in block] for block in blocks]


def _block_errors(blocks: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Iterator[float]:
    """For each block: the error of its largest value, of its norm, and the norm of the differences by its norm.

    A block that is smaller than most, as of differences of large numbers, is measured by the others.
    """
    norms = [max(block[1], other[1]) for block, other in zip(blocks, others, strict=True)]
    least = max(median(norms), SMALL_BLOCK * max(norms))
    for block, other, norm in zip(blocks, others, norms, strict=True):
        yield abs(block[0] - other[0])
        yield abs(block[1] - other[1]) / max(norm, least)
        squares = [(a - b) ** 2 for a, b in zip(block[2:], other[2:], strict=True)]
        yield math.sqrt(math.fsum(squares) / len(squares)) / max(norm, least)


def _share_of_differences(part: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    sample, others = part.get("sample"), other.get("sample")
    if not sample or not others or part.get("type") != other.get("type"):
        return math.inf
    count = max(1, math.prod(map(float, part["shape"])))  # A text would be repeated.
    differing = sum(a != b for a, b in zip(sample, others, strict=True)) / len(sample)
    return float(max(differing, 1 / count))
