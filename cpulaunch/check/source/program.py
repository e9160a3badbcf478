"""A parsed program: the parents of its nodes, and what its names refer to where that is certain."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from cpulaunch.check.source.straight_line import Blocks, StoredNames, last_assigned

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.Module, ast.ClassDef)
DEPTH = 6
"""Assignments that are followed from a name to its value."""


class ParsedProgram:
    """A module's tree with its text, its nodes and its calls. Names are resolved only where that is certain.

    Raises: SyntaxError.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.nodes = tuple(ast.walk(self.tree))
        self.children = {node: tuple(ast.iter_child_nodes(node)) for node in self.nodes}
        self.parents = {child: node for node, children in self.children.items() for child in children}
        self.calls = tuple(node for node in self.nodes if isinstance(node, ast.Call))
        self.bindings: defaultdict[tuple[ast.AST, str], list[ast.AST | None]] = defaultdict(list)
        self.imports: dict[tuple[ast.AST, str], str] = {}
        self.attributes: defaultdict[tuple[ast.AST, str], list[ast.AST | None]] = defaultdict(list)
        self._elsewhere: dict[tuple[ast.AST, str], ast.AST | None] = {}
        for node in self.nodes:
            if isinstance(node, ast.Global | ast.Nonlocal):
                self._declare(node)
        for node in self.nodes:
            self._bind(node)
        self._scopes: dict[ast.Name, ast.AST] = {}
        self._stored, self._blocks = StoredNames(), Blocks(self.nodes)
        self._callers = self._direct_calls()

    @cached_property
    def lines(self) -> list[str]:
        """The text's lines as Python counts them."""
        return lines_of(self.text)

    def source(self, node: ast.expr) -> str:
        """An expression as it is written; over several lines, or in an f-string, as Python writes it."""
        line = self.lines[node.lineno - 1]
        written = line.encode()[node.col_offset : node.end_col_offset].decode(errors="replace")
        return written if node.lineno == node.end_lineno and _is_same(written, node) else ast.unparse(node)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that contain a node, from the inside out."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module that a node is in."""
        return next((each for each in self.around(node) if isinstance(each, SCOPES)), self.tree)

    def function(self, node: ast.AST) -> ast.AST:
        """The function that a node is in; the module if it is in none."""
        return next((each for each in self.around(node) if isinstance(each, FUNCTIONS)), self.tree)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The class whose method a node is in."""
        return next((each for each in self.around(node) if isinstance(each, ast.ClassDef)), None)

    def dotted(self, node: ast.AST | None) -> str:
        """The full name of an imported function or class, as "torch.nn.Linear"; empty if it is not certain."""
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        if not isinstance(node, ast.Name):
            return ""
        scope = self._binding_scope(node)
        return self.imports.get((scope, node.id), "") if len(self.bindings.get((scope, node.id), ())) == 1 else ""

    def called(self, node: ast.AST | None) -> str:
        """The full name of what a call calls; empty if it is no call, or the name is not certain."""
        return self.dotted(node.func) if isinstance(node, ast.Call) else ""

    def value(self, node: ast.AST | None) -> ast.AST | None:
        """What an expression was assigned from: follows names and attributes of self that are assigned once.

        Of a name that is assigned more often, the assignment before it on the same straight way counts. The parameter
        of a function that this file calls in one place is assigned from the argument there.
        """
        for _ in range(DEPTH):
            if isinstance(node, ast.Name):
                found = self.bindings.get((self._binding_scope(node), node.id), [])
            elif is_of_self(node) and isinstance(node, ast.Attribute) and (owner := self.class_of(node)):
                found = self.attributes[owner, node.attr]
            else:
                return node
            source = found[0] if len(found) == 1 else self._reaching(node)
            if isinstance(source, ast.expr) and source in self.around(node):
                return node  # `x = f(x)`: what it was before is not in the source.
            source = self._argument(source) if isinstance(source, ast.arg) else source
            if source is None:
                return node
            node = source
        return node

    def values(self, node: ast.AST | None) -> list[ast.AST]:
        """What an expression may have been assigned from; of a name all assignments, if each of them is certain."""
        value = self.value(node)
        if isinstance(value, ast.Name):
            found = self.bindings.get((self._binding_scope(value), value.id), [])
            known: list[ast.AST] = [each for each in found if isinstance(each, ast.expr)]
            return known if len(known) == len(found) else []
        return [] if value is None else [value]

    def caller(self, function: ast.AST) -> ast.Call | None:
        """The only call of a function in this file; None if there are several, or none, or other uses of its name."""
        calls = self._callers.get(function, [])
        return calls[0] if len(calls) == 1 else None

    def same(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether two expressions are the same name, or the same attribute of self, in the same scope."""
        if ast.dump(one) != ast.dump(other):
            return False
        if isinstance(one, ast.Name) and isinstance(other, ast.Name):
            return self._binding_scope(one) is self._binding_scope(other)
        return is_of_self(one) and self.class_of(one) is self.class_of(other)

    def imports_module(self, name: str) -> bool:
        """Whether the program imports a module, or something from it."""
        return any(each == name or each.startswith(f"{name}.") for each in self.imports.values())

    def _binding_scope(self, name: ast.Name) -> ast.AST:
        """The scope that binds a name where it is used; the module if none does."""
        if name not in self._scopes:
            self._scopes[name] = self._found_scope(name)
        return self._scopes[name]

    def _found_scope(self, name: ast.Name) -> ast.AST:
        scopes = [each for each in self.around(name) if isinstance(each, SCOPES)]
        for place, scope in enumerate(scopes):
            if isinstance(scope, ast.ClassDef) and place:
                continue
            if (scope, name.id) in self.bindings:
                return scope
        return self.tree

    def _declare(self, node: ast.Global | ast.Nonlocal) -> None:
        """A name that a function binds elsewhere; what a nonlocal one refers to is left open."""
        scope = self.scope(node)
        for name in node.names:
            self._elsewhere[scope, name] = self.tree if isinstance(node, ast.Global) else None

    def _add(self, scope: ast.AST, name: str, value: ast.AST | None) -> None:
        target = self._elsewhere.get((scope, name), scope)
        if target is not None:
            self.bindings[target, name].append(value)
            return
        for each in self.around(scope):
            if isinstance(each, FUNCTIONS):
                self.bindings[each, name].append(None)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._bind_import(node)
        elif isinstance(node, ast.arg):
            self._add(self.scope(node), node.arg, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._add(self.scope(node), node.name, node)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            self._add(self.scope(node), node.name, None)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            self._add(self.scope(node), node.rest, None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._add(self.scope(node), node.id, self.assigned(node))
        elif is_of_self(node) and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = self.class_of(node)
            if owner is not None:
                self.attributes[owner, node.attr].append(self.assigned(node))

    def _bind_import(self, node: ast.Import | ast.ImportFrom) -> None:
        scope = self.scope(node)
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                self._import(scope, alias.asname or first, alias.name if alias.asname else first)
            return
        for alias in node.names:
            if node.module and not node.level:
                self._import(scope, alias.asname or alias.name, f"{node.module}.{alias.name}")
            else:
                self._add(scope, alias.asname or alias.name, None)

    def _import(self, scope: ast.AST, name: str, target: str) -> None:
        if self.imports.get((scope, name)) != target:
            self.imports[self._elsewhere.get((scope, name)) or scope, name] = target
            self._add(scope, name, None)

    def _direct_calls(self) -> dict[ast.AST, list[ast.Call]]:
        """Function or class at the top of the file -> its calls; one that is used in another way too has none."""
        functions = {each.name: each for each in self.tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        found: dict[ast.AST, list[ast.Call]] = {}
        used_otherwise: set[ast.AST] = set()
        for node in self.nodes:
            if not isinstance(node, ast.Name) or node.id not in functions or not isinstance(node.ctx, ast.Load):
                continue
            function, parent = functions[node.id], self.parents[node]
            if self.bindings.get((self._binding_scope(node), node.id)) != [function]:
                continue
            if isinstance(parent, ast.Call) and parent.func is node:
                found.setdefault(function, []).append(parent)
            else:
                used_otherwise.add(function)
        return {function: calls for function, calls in found.items() if function not in used_otherwise}

    def _argument(self, parameter: ast.arg) -> ast.AST | None:
        """What the only call of a function gives for a parameter; None if that is not certain."""
        arguments = self.parents[parameter]
        function = self.parents.get(arguments)
        if not isinstance(arguments, ast.arguments) or not isinstance(function, ast.FunctionDef):
            return None
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        owner = self.parents[function]
        is_constructor = isinstance(owner, ast.ClassDef) and function.name == "__init__"
        call = self.caller(owner if is_constructor else function)
        if call is None or is_open(call):
            return None
        position = names.index(parameter.arg) - is_constructor if parameter.arg in names else -1
        return argument(call, parameter.arg, position if position >= 0 else None)

    def _reaching(self, node: ast.AST) -> ast.AST | None:
        """What the last assignment before a use gives a name that is assigned more than once, if that is certain."""
        if not isinstance(node, ast.Name) or any(name == node.id for _, name in self._elsewhere):
            return None
        scope = self.scope(node)
        if scope is not self._binding_scope(node):
            return None
        return last_assigned(node, self.around(node), scope, stored=self._stored, before=self._blocks.before)

    def assigned(self, target: ast.AST) -> ast.AST | None:
        """What a statement assigns to a name or an attribute; None if it is not the only target of the statement."""
        parent = self.parents[target]
        return parent.value if isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr) else None


def _is_same(text: str, node: ast.expr) -> bool:
    """Whether a text is an expression's."""
    try:
        return ast.dump(ast.parse(text, mode="eval").body) == ast.dump(node)
    except SyntaxError:
        return False


def lines_of(text: str) -> list[str]:
    """The text's lines as Python counts them."""
    return re.split("\r\n|\r|\n", text)


def characters(line: str, count: int) -> int:
    """How many characters the first bytes of a line are in UTF-8, which ast counts in."""
    return count if line.isascii() else len(line.encode()[:count].decode(errors="replace"))


def is_of_self(node: ast.AST | None) -> bool:
    """Whether an expression is an attribute of self."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The value of an argument, given by its name or its position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position is not None and position < len(call.args) else None


def is_open(call: ast.Call) -> bool:
    """Whether a call has * or ** arguments, which may hold any."""
    return any(word.arg is None for word in call.keywords) or any(isinstance(each, ast.Starred) for each in call.args)


def spread(program: ParsedProgram, call: ast.Call) -> ast.Call | None:
    """A call with the words of its ** arguments written out; None if it has * arguments, or some are not certain."""
    words: list[ast.keyword] = []
    for word in call.keywords:
        known = [word] if word.arg is not None else _words(program, word.value)
        if known is None:
            return None
        words += known
    whole = ast.Call(func=call.func, args=call.args, keywords=words)
    return None if is_open(whole) else ast.copy_location(whole, call)


def _words(program: ParsedProgram, given: ast.expr) -> list[ast.keyword] | None:
    """The words of a dictionary that is written where it is given, or kept in a name that is only used to give it."""
    value = program.value(given)
    if isinstance(given, ast.Name):
        uses = [node for node in program.nodes if isinstance(node, ast.Name) and node.id == given.id]
        made = [node for node in uses if program.assigned(node) is value]
        if not made or not all(node in made or _is_spread(program.parents[node]) for node in uses):
            return None  # A parameter's dictionary may be changed under another name.
    elif value is not given:
        return None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict" and not value.args:
        return value.keywords
    if not isinstance(value, ast.Dict) or not all(isinstance(key, ast.Constant) for key in value.keys):
        return None
    keys = [key.value for key in value.keys if isinstance(key, ast.Constant)]
    return [ast.keyword(arg=str(key), value=each) for key, each in zip(keys, value.values, strict=True)]


def _is_spread(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg is None


def is_constant(node: ast.AST | None, *values: object) -> bool:
    """Whether an expression is one of these constants, of the same type."""
    return isinstance(node, ast.Constant) and any(
        node.value == value and type(node.value) is type(value) for value in values
    )


def method(call: ast.AST) -> str:
    """The name of the method that a call calls; empty if it calls none."""
    return call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def receiver(call: ast.AST) -> ast.expr | None:
    """What a method is called on."""
    return call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
