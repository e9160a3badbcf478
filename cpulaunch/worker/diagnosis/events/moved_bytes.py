"""How many bytes element-wise operations move, from the shapes and types of their inputs. Pure."""

from __future__ import annotations

from math import prod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.worker.diagnosis.events.kinds import Event

ITEM_BYTES = {
    "double": 8,
    "float": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "BFloat16": 2,
    "Half": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
"""By the names that the profiler gives types."""
ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "div", "neg", "abs", "square", "sqrt", "rsqrt", "reciprocal", "copy"),
    *("relu", "leaky_relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "threshold", "threshold_backward"),
    *("addcmul", "addcdiv", "lerp", "maximum", "minimum", "where", "masked_fill"),
)
"""Operations of next to no arithmetic, which take as long as their memory does."""
WRITTEN_ONLY = ("copy_",)
"""They write their first input and do not read it."""


def bytes_moved(event: Event) -> float:
    """Bytes that an element-wise operation reads and writes; 0 for other operations and unknown types.

    Its result has the shape of all inputs together, and the widest of their types. One in place writes its first input.
    """
    family, _, name = event.name.rpartition("::")
    if family != "aten" or name.removesuffix("_") not in ELEMENTWISE:
        return 0.0
    inputs = [(tuple(shape), type_) for shape, type_ in zip(event.shapes, event.types, strict=False) if shape]
    if not inputs or any(type_ not in ITEM_BYTES or not _is_shape(shape) for shape, type_ in inputs):
        return 0.0
    result = prod(_broadcast([shape for shape, _ in inputs]))
    written = inputs[0][1] if name.endswith("_") else max((type_ for _, type_ in inputs), key=ITEM_BYTES.__getitem__)
    read = inputs[1:] if name in WRITTEN_ONLY else inputs
    return float(sum(prod(shape) * ITEM_BYTES[type_] for shape, type_ in read) + result * ITEM_BYTES[written])


def elements(event: Event) -> int | None:
    """How many elements the shapes of its inputs together have; None if these are not known."""
    shapes = [tuple(shape) for shape in event.shapes if shape]
    return prod(_broadcast(shapes)) if shapes and all(map(_is_shape, shapes)) else None


def _is_shape(shape: Sequence[object]) -> bool:
    return all(isinstance(each, int) and each >= 0 for each in shape)


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The shape that broadcasting gives."""
    length = max(map(len, shapes))
    padded = [(1,) * (length - len(shape)) + tuple(shape) for shape in shapes]
    return [max(sizes) if min(sizes) > 0 else 0 for sizes in zip(*padded, strict=True)]
