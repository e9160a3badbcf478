"""Random changes to valid input: for where atheris, which lets coverage guide them, is not installed."""

import random
from collections.abc import Sequence

MAX_BYTES = 4096


def mutated(chance: random.Random, seeds: Sequence[bytes], words: Sequence[bytes], separator: bytes) -> bytes:
    """Input made of a seed by some changes."""
    data = chance.choice(seeds)
    for _ in range(chance.choice((1, 1, 2, 4, 8, 20))):
        data = _changed(chance, data, seeds, words, separator)
    return data[:MAX_BYTES]


def _changed(
    chance: random.Random, data: bytes, seeds: Sequence[bytes], words: Sequence[bytes], separator: bytes
) -> bytes:
    """The data with one change: bytes or a word put in, cut out, repeated, replaced or taken from another seed."""
    start = chance.randrange(len(data) + 1)
    end = min(len(data), start + chance.choice((0, 0, 1, 2, 8, 64)))
    other = chance.choice(seeds)
    begin = chance.randrange(len(other) + 1)
    edge = separator * chance.randrange(2)
    new = chance.choice(
        (
            b"",
            chance.randbytes(chance.choice((1, 1, 2, 4))),
            str(chance.choice((0, 1, -1, 255, 65536, 1 << 31, 1 << 63, 10**30))).encode(),
            edge + chance.choice(words or (b"",)) + edge,
            edge + chance.choice(words or (b"",)) + edge,
            edge + other[begin : begin + chance.randrange(1, 200)],
            data[start:end] * chance.choice((2, 3, 100)),
        )
    )
    return data[:start] + new + data[end:]
