"""The kernel's list format for CPU and NUMA node ids: "0-3,8" <-> frozenset of ints."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

MAX_ID = 1 << 14
"""Largest id accepted: twice the CPUs of any kernel build. Source: Linux, arch/x86/Kconfig (NR_CPUS_RANGE_END)."""

MAX_CHARACTERS = 1 << 18
"""Longest list accepted: twice the length of one that names every id by itself."""
MAX_NAMED = 2 * (MAX_ID + 1)
"""Ids that the parts of a list may name together, twice named ones counted twice."""
MAX_DIGITS = 20


def parse_cpulist(text: str) -> frozenset[int]:
    """The ids named by a list such as "0-3,8" or "0-31:2/8" (range:used/group) or "0-30:2" (step).

    Raises: ValueError naming the malformed part, or if the list repeats itself more than once.
    Source: kernel, Documentation/admin-guide/kernel-parameters.rst ("cpu lists").
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a list of {len(text)} characters; at most {MAX_CHARACTERS} are read")
    ids: set[int] = set()
    named = 0
    for part in text.strip().strip("\0").split(","):
        part = part.strip()
        if part:
            found = _parse_range(part)
            named += len(found)
            if named > MAX_NAMED:
                raise ValueError(f"the list names more than {MAX_NAMED} ids, many of them twice")
            ids.update(found)
    return frozenset(ids)


def _parse_range(part: str) -> Collection[int]:
    span, colon, stride = part.partition(":")
    first, dash, last = span.partition("-")
    used, slash, group = stride.partition("/")
    try:
        start = _number(first)
        end = _number(last) if dash else start
        width = _number(used) if slash else 1
        step = _number(group if slash else used) if colon else 1
    except ValueError:
        raise ValueError(f"malformed CPU list part {part[:40]!r}") from None
    if end < start or step < 1 or not 1 <= width <= step:
        raise ValueError(f"malformed CPU list part {part[:40]!r}")
    if end > MAX_ID:
        raise ValueError(f"{end} is above the largest id, {MAX_ID}")
    if not colon:
        return range(start, end + 1)
    return tuple(id_ for base in range(start, end + 1, step) for id_ in range(base, min(base + width, end + 1)))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ValueError(text)
    return int(text)


def parse_cpumask(text: str) -> frozenset[int]:
    """The ids set in a hexadecimal mask such as "00000000,000000ff" (most significant word first).

    Raises: ValueError if it is not hexadecimal, or names an id above MAX_ID.
    Source: kernel, bitmap_print_to_pagebuf (32-bit words separated by commas).
    """
    words = text.strip().strip("\0").strip()
    digits = words.replace(",", "").replace("0x", "")
    if len(digits) > MAX_ID // 4 or not (digits or "0").isalnum():
        raise ValueError(f"malformed CPU mask {words[:40]!r}")
    mask = int(digits, 16) if digits else 0
    ids: set[int] = set()
    while mask:
        low = mask & -mask
        ids.add(low.bit_length() - 1)
        mask ^= low
    return frozenset(ids)


def mask_of(ids: Iterable[int]) -> int:
    """The ids as the set bits of a number, which takes 2 KiB at most, where a set takes up to 1 MB.

    Raises: ValueError if one is above MAX_ID, or negative.
    """
    bits = bytearray(MAX_ID // 8 + 1)
    for id_ in ids:
        if not 0 <= id_ <= MAX_ID:
            raise ValueError(f"{id_} is no id up to {MAX_ID}")
        bits[id_ // 8] |= 1 << id_ % 8
    return int.from_bytes(bits, "little")


def format_cpulist(ids: Iterable[int]) -> str:
    """The canonical list for a set of ids: ascending, ranges joined; "" for the empty set."""
    ranges: list[tuple[int, int]] = []
    for id_ in sorted(set(ids)):
        if ranges and ranges[-1][1] == id_ - 1:
            ranges[-1] = (ranges[-1][0], id_)
        else:
            ranges.append((id_, id_))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def cpus_text(ids: Collection[int]) -> str:
    """CPUs by name: "CPU 4", "CPUs 0-3,8"."""
    return f"CPU{'s' * (len(ids) != 1)} {format_cpulist(ids)}"


def cpus_are(ids: Collection[int]) -> str:
    """CPUs by name, with their verb: "CPU 4 is", "CPUs 0-3,8 are"."""
    return f"{cpus_text(ids)} {'is' if len(ids) == 1 else 'are'}"
