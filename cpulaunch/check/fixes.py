"""Findings' edits applied to a program's text: each call is changed with libcst, and no character around it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

import libcst as cst
from libcst import matchers

from cpulaunch.check.findings import CallEdit, SourceFinding
from cpulaunch.check.source.performance_visitor import MAX_CALL

Span = tuple[int, int]
"""Where a call is in a text: the offsets of its first character, and of the one behind its last."""


def fixed(text: str, findings: Iterable[SourceFinding], *, unsafe: bool = False) -> tuple[str, int]:
    """The text with the edits of findings, and how many were applied; without `unsafe` only the safe ones.

    A call that libcst cannot parse, or whose change would lose a comment, is left as it is, and so is a text that
    would not be Python afterwards.
    """
    chosen = [each for each in findings if each.edit and (unsafe or not each.edit.unsafe)]
    starts = [0, *(line_end.end() for line_end in re.finditer("\r\n|\r|\n", text))] if chosen else []
    edits = {_span(each, starts): each.edit for each in chosen if each.edit}
    new, count = _applied(text, edits)
    return (new, count) if not count or _parses(new) else (text, 0)


def _span(finding: SourceFinding, starts: list[int]) -> Span:
    first, last = starts[finding.line - 1], starts[finding.end_line - 1]
    return first + finding.column - 1, last + finding.end_column - 1


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _applied(text: str, edits: Mapping[Span, CallEdit]) -> tuple[str, int]:
    """The text with calls changed, and how many they are."""
    parts, done, count = [], 0, 0
    for outer, inner in _outermost(edits):
        new, changes = _applied_within(text[slice(*outer)], {span: edits[span] for span in inner}, outer[0])
        parts += [text[done : outer[0]], new]
        done, count = outer[1], count + changes
    return "".join((*parts, text[done:])), count


def _outermost(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """The calls that are in no other one, in order, each with all that it contains, itself too."""
    group: list[Span] = []
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        if group and span[0] >= group[0][1]:
            yield group[0], group
            group = []
        group.append(span)
    if group:
        yield group[0], group


def _applied_within(text: str, edits: Mapping[Span, CallEdit], offset: int) -> tuple[str, int]:
    """The text of a call, which starts at an offset, with this call and others in it changed, the inner ones first."""
    count, growth = 0, dict.fromkeys(edits, 0)
    for start, end in sorted(edits, key=lambda span: (-span[0], span[1])):
        place = slice(start - offset, end - offset + growth[start, end])
        new = _changed(text[place], edits[start, end])
        if new is None:
            continue
        count += 1
        for span in edits:
            if span[0] <= start and end <= span[1]:
                growth[span] += len(new) - len(text[place])
        text = text[: place.start] + new + text[place.stop :]
    return text, count


def _changed(text: str, edit: CallEdit) -> str | None:
    """The text of a call after an edit; None if it is left as it is."""
    if len(text) > MAX_CALL:
        return None
    try:
        module = cst.parse_module(f"({text})")  # In parentheses it may go on over lines.
    except (cst.ParserSyntaxError, RecursionError):
        return None
    before = _call(module)
    if before is None or module.code_for_node(before) != text:
        return None
    call: cst.BaseExpression = before
    if edit.unwrap:
        call = before.func.value if isinstance(before.func, cst.Attribute) else before
    if not isinstance(call, cst.Call):
        return None
    after = _with_arguments(call, edit)
    if len(matchers.findall(after, matchers.Comment())) < len(matchers.findall(before, matchers.Comment())):
        return None
    return module.code_for_node(after)


def _call(module: cst.Module) -> cst.Call | None:
    """The call that a module consists of, without the parentheses around it."""
    line = module.body[0] if len(module.body) == 1 else None
    statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
    call = statement.value if isinstance(statement, cst.Expr) else None
    return call.with_changes(lpar=call.lpar[1:], rpar=call.rpar[:-1]) if isinstance(call, cst.Call) else None


def _with_arguments(call: cst.Call, edit: CallEdit) -> cst.Call:
    kept = [each for each in call.args if each.keyword is None or each.keyword.value not in edit.remove]
    if not kept and not edit.set and _breaks(call.whitespace_before_args):
        return call.with_changes(args=(), whitespace_before_args=cst.SimpleWhitespace(""))
    missing = dict(edit.set)
    changed = []
    for each in kept:
        text = missing.pop(each.keyword.value, None) if each.keyword else None
        changed.append(each if text is None else each.with_changes(value=cst.parse_expression(text)))
    if changed and kept[-1] is not call.args[-1]:
        changed[-1] = _as_last(changed[-1], call.args[-1])
    for name, text in missing.items():
        changed = _appended(call, changed, _keyword(name, text))
    return call.with_changes(args=changed)


def _as_last(new: cst.Arg, old: cst.Arg) -> cst.Arg:
    """An argument that becomes the last one of a call: what follows it is what followed the last one before.

    A comment behind it stays, where the line goes on.
    """
    space = new.comma.whitespace_after if isinstance(new.comma, cst.Comma) else None
    if not isinstance(space, cst.ParenthesizedWhitespace) or not matchers.findall(space, matchers.Comment()):
        return new.with_changes(comma=old.comma, whitespace_after_arg=old.whitespace_after_arg)
    comma = old.comma if isinstance(old.comma, cst.Comma) else None
    end = comma.whitespace_after if comma else old.whitespace_after_arg
    if not isinstance(end, cst.ParenthesizedWhitespace):
        return new
    space = space.with_changes(indent=end.indent, last_line=end.last_line)
    if comma:
        return new.with_changes(comma=comma.with_changes(whitespace_after=space))
    return new.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=space)


def _appended(call: cst.Call, args: list[cst.Arg], new: cst.Arg) -> list[cst.Arg]:
    """Arguments and one more, on a line of its own if the others are, and with a comma behind it if they have one.

    A comment behind the last argument stays there.
    """
    if not args:
        return [new]
    last, is_alone = args[-1], _breaks(call.whitespace_before_args)
    space = last.comma.whitespace_after if isinstance(last.comma, cst.Comma) else last.whitespace_after_arg
    if isinstance(space, cst.ParenthesizedWhitespace) and matchers.findall(space, matchers.Comment()):
        return [*args[:-1], *_behind_comment(call, last, new, space)]
    space = call.whitespace_before_args if is_alone else cst.SimpleWhitespace(" ")
    comma = cst.Comma(whitespace_after=space)
    if isinstance(last.comma, cst.Comma):
        new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    else:
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
    last = last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
    return [*args[:-1], last, new]


def _behind_comment(
    call: cst.Call, last: cst.Arg, new: cst.Arg, space: cst.ParenthesizedWhitespace
) -> tuple[cst.Arg, cst.Arg]:
    """The last argument with the comment in the space behind it, and a new one on the next line."""
    before = call.whitespace_before_args
    next_line = before.last_line if isinstance(before, cst.ParenthesizedWhitespace) else space.last_line
    end = space.with_changes(first_line=space.first_line.with_changes(comment=None), empty_lines=())
    end = end.with_changes(first_line=end.first_line.with_changes(whitespace=cst.SimpleWhitespace("")))
    if isinstance(last.comma, cst.Comma):
        new = new.with_changes(comma=last.comma.with_changes(whitespace_after=end))
    else:
        new = new.with_changes(whitespace_after_arg=end)
    comma = cst.Comma(whitespace_after=space.with_changes(last_line=next_line))
    return last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace("")), new


def _breaks(space: cst.BaseParenthesizableWhitespace) -> bool:
    """Whether a line ends in a space between arguments, without a comment there."""
    return isinstance(space, cst.ParenthesizedWhitespace) and space.first_line.comment is None and not space.empty_lines


def _keyword(name: str, text: str) -> cst.Arg:
    equal = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))
    return cst.Arg(keyword=cst.Name(name), value=cst.parse_expression(text), equal=equal)
