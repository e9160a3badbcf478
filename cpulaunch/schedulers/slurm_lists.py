"""Slurm's compact lists: host names with ranges, and numbers with repetitions."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_HOSTS = 1 << 16
"""Limit on the hosts of a list, well above any real cluster."""


def expand_hosts(text: str) -> tuple[str, ...]:
    """The host names of a list such as "n[01-03,7],m1" or "r[1-2]c[0-1]", in its order.

    Raises: ValueError if it is malformed. Source: man scontrol, "show hostnames"; man slurm.conf, NodeName.
    """
    names: list[str] = []
    for part in _split(text):
        for name in _expand(part):
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
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and int(first) <= int(last)):
            raise ValueError(f"malformed range {part!r}")
        if int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"more than {MOST_HOSTS} hosts")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers of "2(x2),1", one for each host: 2, 2, 1. Raises: ValueError if it is malformed.

    Source: man srun, SLURM_STEP_TASKS_PER_NODE; man sbatch, SLURM_JOB_CPUS_PER_NODE.
    """
    counts: list[int] = []
    for part in text.split(","):
        number, repeated, times = part.partition("(x")
        repetitions = times.removesuffix(")") if repeated else "1"
        if not (number.isascii() and number.isdigit() and repetitions.isascii() and repetitions.isdigit()):
            raise ValueError(f"malformed part {part!r}")
        if int(repetitions) + len(counts) > MOST_HOSTS:
            raise ValueError(f"more than {MOST_HOSTS} hosts")
        counts += [int(number)] * int(repetitions)
    return tuple(counts)
