"""Fixes keep the way a call is written, and change no text that they cannot change well."""

import importlib.util

import pytest

from cpulaunch.check.inspect_text import findings
from cpulaunch.check.table import rule_named

if any(importlib.util.find_spec(name) is None for name in ("libcst", "torchfix")):
    pytest.skip("the extra `check` is not installed", allow_module_level=True)

HEAD = "from torch import nn\nnet = nn.Sequential("


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nn.Linear(2, 2)", "nn.Linear(2, 2, bias=False)"),
        ("nn.Linear(2, 2,)", "nn.Linear(2, 2, bias=False,)"),
        ("nn.Linear( 2, 2 )", "nn.Linear( 2, 2, bias=False )"),
        ("nn.Linear(2, 2, bias = True)", "nn.Linear(2, 2, bias = False)"),
        ("nn.Linear(2, bias=True, out_features=2)", "nn.Linear(2, bias=False, out_features=2)"),
        ("nn.Linear(\n    2,\n    2,\n)", "nn.Linear(\n    2,\n    2,\n    bias=False,\n)"),
        ("nn.Linear(\n    2,\n    2\n)", "nn.Linear(\n    2,\n    2,\n    bias=False\n)"),
        ("nn.Linear(2,\n          2)", "nn.Linear(2,\n          2, bias=False)"),
        ("nn.Linear(  # in\n    2,\n    2,  # out\n)", "nn.Linear(  # in\n    2,\n    2, bias=False,  # out\n)"),
        ("nn.Linear(\r\n    2,\r\n    2,\r\n)", "nn.Linear(\r\n    2,\r\n    2,\r\n    bias=False,\r\n)"),
    ],
)
def test_an_added_argument_is_written_as_the_others(before: str, after: str) -> None:
    from cpulaunch.check.fixes import fixed

    rest = ", nn.BatchNorm1d(2))  # kept\n"
    text = HEAD + before + rest
    new, count = fixed(text, findings(text, [rule_named("bias-before-norm")]), unsafe=True)
    assert (new, count) == (HEAD + after + rest, 1)
    assert fixed(new, findings(new, [rule_named("bias-before-norm")]), unsafe=True) == (new, 0)
