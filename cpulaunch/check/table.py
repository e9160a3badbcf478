"""Every rule, found in the folders of cpulaunch.check.rules: a new rule is a new file."""

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache

from cpulaunch.check import rules
from cpulaunch.check.findings import Rule
from cpulaunch.records.errors import UsageError

ALL = "all"
"""In place of an id: every rule."""


@cache
def all_rules() -> Mapping[str, Rule]:
    """Id -> rule, by id."""
    modules = pkgutil.walk_packages(rules.__path__, f"{rules.__name__}.")
    found = [importlib.import_module(each.name).RULE for each in modules if not each.ispkg]
    return {rule.id: rule for rule in sorted(found, key=lambda rule: rule.id)}


def rule_named(name: str) -> Rule:
    """The rule with this id. Raises: UsageError."""
    from difflib import get_close_matches

    known = all_rules()
    if name not in known:
        close = get_close_matches(name, known, n=1) or list(known)
        raise UsageError("no such rule", value=name, hint=f"rules: {', '.join(close)}")
    return known[name]


def selected(select: Iterable[str], ignore: Iterable[str]) -> tuple[Rule, ...]:
    """The rules named in `select`, "all" for every one, without those in `ignore`. Raises: UsageError.

    By default those that are on by default.
    """
    names = [each for name in select for each in (all_rules() if name == ALL else (name,))]
    names = names or [name for name, rule in all_rules().items() if rule.is_default]
    chosen = {name: rule_named(name) for name in names}
    for name in ignore:
        chosen.pop(rule_named(name).id, None)
    return tuple(chosen.values())
