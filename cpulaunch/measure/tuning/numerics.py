"""Outputs of two runs compared by their checksums: equal, equal but for rounding, within an error, or wrong."""

from __future__ import annotations

import math

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypeAlias

    Parts: TypeAlias = "Sequence[Mapping[str, Any]]"
    Outputs: TypeAlias = "Mapping[str, Parts]"

ROUNDING = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
"""Errors by which other numbers of threads may change results: about a thousand units in the last place, because layers
add up what each of them rounds."""
ROUNDING_ELSEWHERE = 0.0
"""For integers and texts."""
MANY = 16
"""So many numbers of one kind are a vector, whose small elements have the errors of its large ones."""
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

    Of floats the larger of two: an element's error by the largest value (of the sample), and the root of the mean
    squared error by that of the values (of all elements, from the projections).
    """
    if part.get("shape") != other.get("shape") or part.get("place") != other.get("place"):
        return math.inf
    if part.get("digest", 0) == other.get("digest", 1) and part.get("type") == other.get("type"):
        return 0.0
    try:
        if "numbers" in part:
            return _numbers_error(part["numbers"], other["numbers"])
        if "projections" in part:
            return _float_error(part, other)
        return _share_of_differences(part, other)
    except (KeyError, TypeError, ValueError, OverflowError):  # Any process may have written it.
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
    if list(part["not_finite"]) != list(other["not_finite"]):
        return math.inf
    differences = [a - b for a, b in zip(part["sample"], other["sample"], strict=True)]
    projected = [a - b for a, b in zip(part["projections"], other["projections"], strict=True)]
    scale = max(abs(float(part["largest"])), abs(float(other["largest"])))
    norm = max(float(part["norm"]), float(other["norm"]))
    if not scale or not norm:
        return 0.0
    largest = max(map(abs, differences), default=0.0) / scale
    total = math.sqrt(math.fsum(each * each for each in projected) / len(projected)) / norm
    error = max(largest, total, abs(float(part["norm"]) - float(other["norm"])) / norm)
    return error if math.isfinite(error) else math.inf


def _share_of_differences(part: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    sample, others = part.get("sample"), other.get("sample")
    if not sample or not others or part.get("type") != other.get("type"):
        return math.inf
    count = max(1, math.prod(part["shape"]))
    differing = sum(a != b for a, b in zip(sample, others, strict=True)) / len(sample)
    return float(max(differing, 1 / count))
