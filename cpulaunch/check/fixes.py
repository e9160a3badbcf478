"""Findings' edits applied to a program's text with libcst: everything else keeps its formatting."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from cpulaunch.check.findings import CallEdit, SourceFinding

Place = tuple[int, int, int, int]


def fixed(text: str, findings: Iterable[SourceFinding], *, unsafe: bool = False) -> tuple[str, int]:
    """The text with the edits of findings, and how many were applied; without `unsafe` only the safe ones.

    A text that libcst cannot parse, or that would not be Python afterwards, is left as it is.
    """
    edits = {_place(each): each.edit for each in findings if each.edit and (unsafe or not each.edit.unsafe)}
    if not edits:
        return text, 0
    change = _Change(edits)
    try:
        new = MetadataWrapper(cst.parse_module(text)).visit(change).code
        ast.parse(new)
    except (cst.ParserSyntaxError, SyntaxError):
        return text, 0
    return new, change.applied


def _place(finding: SourceFinding) -> Place:
    """Where a finding is, as libcst counts: columns from zero."""
    return finding.line, finding.column - 1, finding.end_line, finding.end_column - 1


class _Change(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, edits: Mapping[Place, CallEdit]) -> None:
        super().__init__()
        self.edits = edits
        self.applied = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        """The call, changed if there is an edit for it. Overrides: libcst's method of this name."""
        position: Any = self.get_metadata(PositionProvider, original_node)
        place = (position.start.line, position.start.column, position.end.line, position.end.column)
        edit = self.edits.get(place)
        if edit is None:
            return updated_node
        call = updated_node
        if edit.unwrap:
            if not isinstance(call.func, cst.Attribute) or not isinstance(call.func.value, cst.Call):
                return updated_node
            call = call.func.value
        self.applied += 1
        return call.with_changes(args=_arguments(call, edit))


def _arguments(call: cst.Call, edit: CallEdit) -> list[cst.Arg]:
    kept = [each for each in call.args if each.keyword is None or each.keyword.value not in edit.remove]
    missing = dict(edit.set)
    changed = []
    for each in kept:
        text = missing.pop(each.keyword.value, None) if each.keyword else None
        changed.append(each if text is None else each.with_changes(value=cst.parse_expression(text)))
    for name, text in missing.items():
        changed = _appended(call, changed, _keyword(name, text))
    if changed and len(kept) < len(call.args) and not missing:
        changed[-1] = changed[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return changed


def _appended(call: cst.Call, args: list[cst.Arg], new: cst.Arg) -> list[cst.Arg]:
    """Arguments and one more, on a line of its own if the others are, and with a comma behind it if they have one."""
    if not args:
        return [new]
    last, is_alone = args[-1], _breaks(call.whitespace_before_args)
    space = call.whitespace_before_args if is_alone else cst.SimpleWhitespace(" ")
    comma = cst.Comma(whitespace_after=space)
    if isinstance(last.comma, cst.Comma):
        new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    else:
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
    last = last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
    return [*args[:-1], last, new]


def _breaks(space: cst.BaseParenthesizableWhitespace) -> bool:
    """Whether a line ends in a space between arguments, without a comment there."""
    return isinstance(space, cst.ParenthesizedWhitespace) and space.first_line.comment is None and not space.empty_lines


def _keyword(name: str, text: str) -> cst.Arg:
    equal = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))
    return cst.Arg(keyword=cst.Name(name), value=cst.parse_expression(text), equal=equal)
