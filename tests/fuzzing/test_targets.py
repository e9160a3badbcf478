"""A short, repeatable part of scripts/fuzz."""

import random

import pytest

from tests.fuzzing.mutation import mutated
from tests.fuzzing.targets import TARGETS, run

INPUTS = 150


@pytest.mark.parametrize("name", TARGETS)
def test_valid_input_and_what_becomes_of_it_by_changes_is_dealt_with(name):
    target = TARGETS[name]
    words = [word.encode("utf-8", "surrogatepass") for word in target.words]
    for seed in target.seeds:
        run(target, seed)
    chance = random.Random(1)
    for _ in range(INPUTS):
        data = mutated(chance, target.seeds, words, target.separator)
        try:
            run(target, data)
        except BaseException as error:
            error.add_note(f"the input: {data!r}")
            raise
