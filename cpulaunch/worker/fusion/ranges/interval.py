"""Ranges of numbers, and arithmetic with them in fp32: what may come of any numbers in the given ranges."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from math import inf

from cpulaunch.records.record import record, replace

OVERFLOW = 3.4028235677973366e38
"""From here on fp32, and bf16 by way of it, round to infinity. Source: IEEE 754, round to nearest."""

HALF_OVERFLOW = 65520.0
"""The same for fp16."""

SMALLEST = 1e-37
"""Smaller numbers count as zero in fp32: an underflow may have made them so."""

EXP_OVERFLOW = 88.7
"""From here on the exponential of a number is infinite in fp32."""

Rounding = Callable[[float], float]
"""The number of some type that is nearest to a number. It keeps the order of numbers, so that bounds stay bounds."""


def to_fp32(value: float) -> float:
    """The nearest number of fp32. `value`: smaller than OVERFLOW."""
    (found,) = struct.unpack("<f", struct.pack("<f", value))
    return float(found)


def to_fp16(value: float) -> float:
    """The nearest number of fp16; the value itself where fp16 overflows, which `overflow` is for."""
    if abs(value) >= HALF_OVERFLOW:
        return value
    (found,) = struct.unpack("<e", struct.pack("<e", value))
    return float(found)


def to_bf16(value: float) -> float:
    """The nearest number of bf16: fp32 with 16 bits less. Numbers that only bf16 rounds to infinity stay finite."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (found,) = struct.unpack("<f", struct.pack("<I", kept))
    return float(found) if abs(found) < OVERFLOW else value


@record
class Range:
    """The numbers that the elements of a tensor may be. An infinite bound means that an element may be infinite.

    `nan`: an element may be NaN. `boolean`: the type is bool. `masked`: besides, there are infinities, at places that
    are the same in all calls.
    """

    low: float
    high: float
    nan: bool = False
    boolean: bool = False
    masked: bool = False

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(-self.low, self.high)

    @property
    def may_be_infinite(self) -> bool:
        """Whether an element may be infinite."""
        return self.largest == inf

    @property
    def may_be_zero(self) -> bool:
        """Whether an element may be zero."""
        return self.low <= 0 <= self.high


ANYTHING = Range(low=-inf, high=inf, nan=True)
BOOLEAN = Range(low=0.0, high=1.0, boolean=True)
WHOLE = Range(low=-(2.0**63), high=2.0**64)
"""Of any integer type."""

COUNT = Range(low=0.0, high=2.0**40)
"""Of sizes and positions."""


def number(value: float) -> Range:
    """The range of one number."""
    return ANYTHING if value != value else Range(low=float(value), high=float(value))


def symmetric(largest: float, *, nan: bool = False) -> Range:
    """The range of numbers up to this magnitude."""
    return Range(low=-largest, high=largest, nan=nan or largest != largest)


def rounded(value: Range, overflow: float = OVERFLOW, roundings: tuple[Rounding, ...] = (to_fp32,)) -> Range:
    """The range of the numbers and of what they are rounded to; from `overflow` on that is infinite."""
    low = min(_rounded(value.low, overflow, roundings))
    high = max(_rounded(value.high, overflow, roundings))
    low, high = 0.0 if 0 < low < SMALLEST else low, 0.0 if -SMALLEST < high < 0 else high
    return value if (low, high) == (value.low, value.high) else replace(value, low=low, high=high)


def _rounded(bound: float, overflow: float, roundings: tuple[Rounding, ...]) -> list[float]:
    """The bound and what it is rounded to."""
    if not -overflow < bound < overflow:
        return [inf if bound > 0 else -inf if bound < 0 else bound]
    return [bound, *(rounding(bound) for rounding in roundings)]


def hull(values: Iterable[Range]) -> Range:
    """The range of numbers that are in one of these ranges."""
    known = list(values)
    if not known:
        return ANYTHING
    return Range(
        low=min(each.low for each in known),
        high=max(each.high for each in known),
        nan=any(each.nan for each in known),
        boolean=all(each.boolean for each in known),
        masked=any(each.masked for each in known),
    )


def plain(value: Range) -> Range:
    """The range, with the infinities of a mask among its numbers."""
    return Range(low=-inf, high=inf, nan=value.nan) if value.masked else value


def increasing(function: Callable[[float], float], value: Range, *, nan: bool = False) -> Range:
    """The range of an increasing function's values."""
    return Range(low=function(value.low), high=function(value.high), nan=value.nan or nan)


def add(one: Range, other: Range) -> Range:
    opposite = (one.high == inf and other.low == -inf) or (one.low == -inf and other.high == inf)
    low = -inf if -inf in (one.low, other.low) else one.low + other.low
    high = inf if inf in (one.high, other.high) else one.high + other.high
    clashes = (one.masked and (other.may_be_infinite or other.masked)) or (other.masked and one.may_be_infinite)
    nan = one.nan or other.nan or opposite or clashes
    return rounded(Range(low=low, high=high, nan=nan, masked=one.masked or other.masked))


def negative(value: Range) -> Range:
    return Range(low=-value.high, high=-value.low, nan=value.nan, masked=value.masked)


def multiply(one: Range, other: Range) -> Range:
    products = [_product(a, b) for a in (one.low, one.high) for b in (other.low, other.high)]
    lost = (one.may_be_infinite and other.may_be_zero) or (other.may_be_infinite and one.may_be_zero)
    return rounded(Range(low=min(products), high=max(products), nan=one.nan or other.nan or lost))


def _product(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def divide(one: Range, other: Range) -> Range:
    if other.may_be_zero or (one.may_be_infinite and other.may_be_infinite):
        return ANYTHING
    quotients = [a / b for a in (one.low, one.high) for b in (other.low, other.high)]
    return rounded(Range(low=min(quotients), high=max(quotients), nan=one.nan or other.nan))


def reciprocal(value: Range) -> Range:
    return divide(Range(low=1.0, high=1.0), value)


def square(value: Range) -> Range:
    bounds = sorted(_product(bound, bound) for bound in (value.low, value.high))
    return rounded(Range(low=0.0 if value.may_be_zero else bounds[0], high=bounds[1], nan=value.nan))


def absolute(value: Range) -> Range:
    low = 0.0 if value.may_be_zero else min(abs(value.low), abs(value.high))
    return Range(low=low, high=value.largest, nan=value.nan)


def clamped(value: Range, low: float, high: float) -> Range:
    """The range of numbers that are raised to `low`, then lowered to `high`."""
    bounds = [min(max(bound, low), high) for bound in (value.low, value.high)]
    return Range(low=bounds[0], high=bounds[1], nan=value.nan)


def scaled(value: Range, factor: float) -> Range:
    """The range of sums of up to `factor` such numbers; partial sums overflow before the end."""
    largest = _product(value.largest, factor)
    overflows = largest >= OVERFLOW and value.low < 0 < value.high
    return Range(
        low=min(_product(value.low, factor), value.low),
        high=max(_product(value.high, factor), value.high),
        nan=value.nan or overflows,
    )
