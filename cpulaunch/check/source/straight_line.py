"""Assignments on the straight way to a use: those that no branch, loop or handler can have replaced since."""

import ast
from collections.abc import Callable, Iterable, Iterator

CATCHES = (ast.MatchAs, ast.MatchStar, ast.ExceptHandler, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FARTHEST = 300
"""Statements that are looked back over."""
BLOCKS = ("body", "orelse", "finalbody")


class StoredNames:
    """The names that a statement binds or deletes, itself or within; each statement is looked through once."""

    def __init__(self) -> None:
        self._known: dict[ast.AST, frozenset[str]] = {}

    def __call__(self, node: ast.AST) -> frozenset[str]:
        """The names that a statement or a handler binds or deletes."""
        if node not in self._known:
            self._known[node] = frozenset(name for each in ast.walk(node) for name in _stored(each))
        return self._known[node]


def _stored(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Name):
        return () if isinstance(node.ctx, ast.Load) else (node.id,)
    if isinstance(node, CATCHES):
        return (node.name,) if node.name else ()
    if isinstance(node, ast.MatchMapping):
        return (node.rest,) if node.rest else ()
    if isinstance(node, ast.alias):
        return ((node.asname or node.name).partition(".")[0],)
    return ()


def last_assigned(
    use: ast.Name,
    around: Iterable[ast.AST],
    scope: ast.AST,
    *,
    stored: Callable[[ast.AST], frozenset[str]],
    before: Callable[[ast.AST], Iterable[ast.stmt]],
) -> ast.AST | None:
    """What the last assignment before a use gives its name; None if it is not certain which one that is.

    `around`: the nodes that contain the use, from the inside out, up to its scope. `before`: the statements of
    the same block before one, the nearest first.
    """
    inner: ast.AST = use
    for outer in around:
        if isinstance(inner, ast.While) and use.id in stored(inner):
            return None
        if isinstance(inner, ast.stmt | ast.ExceptHandler | ast.match_case):
            for statement in before(inner):
                if use.id in stored(statement):
                    return _given(statement, use.id)
            if outer is scope or any(use.id in stored(each) for each in _runs_before(outer)):
                return None
        inner = outer
    return None


def _runs_before(outer: ast.AST) -> Iterable[ast.AST]:
    """The parts of a statement that may have run before what is in its block: of a branch only its condition."""
    if isinstance(outer, ast.If):
        return (outer.test,)
    if isinstance(outer, ast.With | ast.AsyncWith):
        return outer.items
    return (outer,)


class Blocks:
    """Where statements are in their blocks."""

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        blocks = [getattr(node, name, None) for node in nodes for name in BLOCKS]
        self._places = {
            each: (block, place) for block in blocks if isinstance(block, list) for place, each in enumerate(block)
        }

    def before(self, statement: ast.AST) -> Iterator[ast.stmt]:
        """The statements of the same block before one, the nearest first; of a long block only the last ones."""
        block, place = self._places.get(statement, ([], 0))
        for earlier in range(place - 1, max(-1, place - 1 - FARTHEST), -1):
            yield block[earlier]


def _given(statement: ast.stmt, name: str) -> ast.AST | None:
    """What a plain assignment to one name gives it."""
    targets = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else [statement.target]
        if isinstance(statement, ast.AnnAssign)
        else []
    )
    is_plain = len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == name
    return statement.value if is_plain and isinstance(statement, ast.Assign | ast.AnnAssign) else None
