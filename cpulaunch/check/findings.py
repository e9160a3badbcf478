"""A rule, what it finds in a program, and how that is fixed."""

import ast
from collections.abc import Callable, Iterable, Mapping

from cpulaunch.check.source.program import ParsedProgram
from cpulaunch.records.record import field, record


@record
class CallEdit:
    """A change to one call. `unwrap`: the call is replaced by the one that its method is called on, changed so.

    `unsafe`: why results or files may differ afterwards; empty if they do not.
    """

    set: Mapping[str, str] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    unwrap: bool = False
    unsafe: str = ""


@record
class Hit:
    """What a rule saw at a node."""

    node: ast.expr | ast.stmt
    seen: str
    edit: CallEdit | None = None


@record
class Rule:
    """A rule. `wrong`: examples with `# <-` on each line that is found; `right`: examples with no finding.

    `is_default`: whether it counts unless rules are selected; one that is wrong more than
    once in ten times does not, nor one of which no finding was judged.
    """

    id: str
    summary: str
    why: str
    fix: str
    find: Callable[[ParsedProgram], Iterable[Hit]]
    wrong: tuple[str, ...]
    right: tuple[str, ...]
    is_default: bool = True


@record
class SourceFinding:
    """A hit with its place: lines and columns count from one; `cell`: of a notebook, from one."""

    rule: Rule
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    seen: str
    edit: CallEdit | None = None
    cell: int | None = None


@record
class ProgramFile:
    """A file to be checked; `is_test`: by its name and folder, so that it has no findings."""

    path: str
    is_test: bool


@record
class Unreadable:
    """A file or a folder that could not be checked, and why."""

    path: str
    reason: str
