"""The findings of rules in the text of one file: pure."""

import ast
import unicodedata
from collections.abc import Iterable, Iterator

from cpulaunch.check.findings import Hit, Rule, SourceFinding
from cpulaunch.check.source.comments import ignored, is_ignored
from cpulaunch.check.source.program import ParsedProgram, characters

TESTS = ("pytest", "unittest")
"""Who imports them is a test, whose speed is of no concern."""


def mentions_torch(text: str) -> bool:
    """Whether a text may import torch: far faster than parsing it. Python normalizes names that are not ASCII."""
    return "torch" in text or (not text.isascii() and "torch" in unicodedata.normalize("NFKC", text))


def findings(text: str, rules: Iterable[Rule], *, path: str = "") -> list[SourceFinding]:
    """What rules find in a program's text, by place. Raises: SyntaxError, RecursionError, ValueError."""
    if not mentions_torch(text):
        return []
    program = ParsedProgram(text)
    if not program.imports_module("torch") or any(program.imports_module(each) for each in TESTS):
        return []
    comments, lines = ignored(text), program.lines
    found = [
        _finding(hit, rule, path, lines, is_quoted=_is_quoted(program, hit.node))
        for rule in rules
        for hit in _unique(rule.find(program))
        if not is_ignored(rule.id, _lines(program, hit.node), comments)
    ]
    return sorted(found, key=lambda each: (each.line, each.column, each.rule.id))


def _unique(hits: Iterable[Hit]) -> Iterator[Hit]:
    seen: set[int] = set()
    for hit in hits:
        if id(hit.node) not in seen:
            seen.add(id(hit.node))
            yield hit


def _lines(program: ParsedProgram, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """First and last line of a finding's statement, where a comment may be: of a block the lines of its head."""
    statement = next((each for each in (node, *program.around(node)) if isinstance(each, ast.stmt)), node)
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno or statement.lineno
    end = (node.end_lineno or 0) if isinstance(node, ast.expr) else 0
    return min(statement.lineno, node.lineno), max(last, end, statement.lineno)


def _is_quoted(program: ParsedProgram, node: ast.AST) -> bool:
    return any(isinstance(each, ast.JoinedStr) for each in program.around(node))


def _finding(hit: Hit, rule: Rule, path: str, lines: list[str], *, is_quoted: bool) -> SourceFinding:
    """A hit's place in characters, where ast counts bytes. Within an f-string an edit may end the string."""
    node = hit.node
    end_line = node.end_lineno or node.lineno
    return SourceFinding(
        rule=rule,
        path=path,
        line=node.lineno,
        column=characters(lines[node.lineno - 1], node.col_offset) + 1,
        end_line=end_line,
        end_column=characters(lines[end_line - 1], node.end_col_offset or 0) + 1,
        seen=hit.seen,
        edit=None if is_quoted else hit.edit,
    )
