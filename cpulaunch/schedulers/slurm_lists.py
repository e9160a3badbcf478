"""Slurm's compact lists: host names with ranges, and numbers with repetitions."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_HOSTS = 1 << 16
"""Limit on the hosts of a list, well above any real cluster."""
MAX_NAME = 255
"""Characters of a host name. Source: RFC 1035, 2.3.4."""
MAX_CHARACTERS = 1 << 20
MAX_DIGITS = 20
MAX_BRACKETS = 16


def expand_hosts(text: str) -> tuple[str, ...]:
    """The host names of a list such as "n[01-03,7],m1" or "r[1-2]c[0-1]", in its order.

    Raises: ValueError if it is malformed. Source: man scontrol, "show hostnames"; man slurm.conf, NodeName.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a list of {len(text)} characters; at most {MAX_CHARACTERS} are read")
    names: list[str] = []
    for part in _split(text):
        if part.count("[") > MAX_BRACKETS:
            raise ValueError(f"a host name with more than {MAX_BRACKETS} brackets")
        for name in _expand(part):
            if len(name) > MAX_NAME:
                raise ValueError(f"a host name of more than {MAX_NAME} characters")
            names.append(name)
            if len(names) > MOST_HOSTS:
                raise ValueError(f"more than {MOST_HOSTS} hosts")
    if not names or not all(names):
        raise ValueError("empty host name")
    return tuple(names)


def _split(text: str) -> Iterator[str]:
    """The parts between those commas that are outside brackets. Raises: ValueError for unbalanced brackets."""
    depth, start = 0, 0
    for position, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if depth not in (0, 1):
            raise ValueError("unbalanced brackets")
        if sign == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth:
        raise ValueError("unbalanced brackets")
    yield text[start:]


def _expand(part: str) -> Iterator[str]:
    """The names of one part; the last bracket varies fastest. Raises: ValueError."""
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, tail = rest.partition("]")
    for number in _numbers(inside):
        for end in _expand(tail):
            yield head + number + end


def _numbers(text: str) -> Iterator[str]:
    """The numbers of "01-03,7" with their leading zeros. Raises: ValueError."""
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last) and int(first) <= int(last)):
            raise ValueError(f"malformed range {part[:40]!r}")
        if int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"more than {MOST_HOSTS} hosts")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers of "2(x2),1", one for each host: 2, 2, 1. Raises: ValueError if it is malformed.

    Source: man srun, SLURM_STEP_TASKS_PER_NODE; man sbatch, SLURM_JOB_CPUS_PER_NODE.
    """
    counts: list[int] = []
    for part in text.split(","):
        number, repeated, times = part.partition("(x")
        repetitions = times.removesuffix(")") if repeated else "1"
        if not (_is_number(number) and _is_number(repetitions)):
            raise ValueError(f"malformed part {part[:40]!r}")
        if int(repetitions) + len(counts) > MOST_HOSTS:
            raise ValueError(f"more than {MOST_HOSTS} hosts")
        counts += [int(number)] * int(repetitions)
    return tuple(counts)
