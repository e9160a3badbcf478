"""Torch's macros, compared with Python's string.Template, which torch uses."""

from string import Template

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpulaunch.plan.command import rank_argv
from cpulaunch.plan.ranks.templates import substitute

VALUES = {"local_rank": "3", "rank": "7", "role_name": "trainer"}
PIECES = st.sampled_from(["$", "{", "}", "local_rank", "rank", "role_name", "a", "1", "_", " ", "é", "R"])


@given(st.lists(PIECES, max_size=10).map("".join))
def test_substitution_equals_string_template(text):
    assert substitute(text, VALUES) == Template(text).safe_substitute(VALUES)


@pytest.mark.parametrize(
    ("word", "became"),
    [
        ("--local-rank=${local_rank}", "--local-rank=3"),
        ("$local_rank/log", "3/log"),
        ("$LOCAL_RANK", "$LOCAL_RANK"),
        ("cost$$5", "cost$5"),
        ("plain", "plain"),
    ],
)
def test_macros_in_arguments_become_the_local_rank(word, became):
    assert rank_argv(("${local_rank}", "-u", word), 3) == ("${local_rank}", "-u", became)
