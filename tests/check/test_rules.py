"""Every rule's examples: what is wrong is found on the marked lines, what is right is not; fixes leave nothing."""

import ast
import importlib.util

import pytest

from cpulaunch.check.findings import Rule
from cpulaunch.check.inspect_text import findings
from cpulaunch.check.table import all_rules

if any(importlib.util.find_spec(name) is None for name in ("libcst", "torchfix")):
    pytest.skip("the extra `check` is not installed", allow_module_level=True)

PRELUDE = """import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

"""
WRONG = [
    pytest.param(rule, text, id=f"{rule.id}-{n}") for rule in all_rules().values() for n, text in enumerate(rule.wrong)
]
RIGHT = [
    pytest.param(rule, text, id=f"{rule.id}-{n}") for rule in all_rules().values() for n, text in enumerate(rule.right)
]
RULES = pytest.mark.parametrize("rule", all_rules().values(), ids=lambda rule: rule.id)


def marked(text: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# <-")]


@pytest.mark.parametrize(("rule", "text"), WRONG)
def test_what_is_wrong_is_found(rule: Rule, text: str) -> None:
    whole = PRELUDE + text
    assert [each.line for each in findings(whole, [rule])] == marked(whole)
    assert marked(whole)


@pytest.mark.parametrize(("rule", "text"), RIGHT)
def test_what_is_right_is_not(rule: Rule, text: str) -> None:
    assert [each.seen for each in findings(PRELUDE + text, [rule])] == []


@RULES
def test_a_rule_has_enough_examples_and_says_all(rule: Rule) -> None:
    assert len(set(rule.wrong)) >= 5
    assert len(set(rule.right)) >= 10
    assert all((rule.summary, rule.why, rule.fix))


@pytest.mark.parametrize(("rule", "text"), WRONG)
def test_a_fix_leaves_no_finding_that_it_can_fix(rule: Rule, text: str) -> None:
    from cpulaunch.check.fixes import fixed

    whole = PRELUDE + text
    found = findings(whole, [rule])
    new, count = fixed(whole, found, unsafe=True)
    ast.parse(new)
    assert count == sum(each.edit is not None for each in found)
    assert len(findings(new, [rule])) == len(found) - count
