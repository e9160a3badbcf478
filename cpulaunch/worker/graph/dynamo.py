"""Functions that the program's own torch.compile is not to trace, and what Dynamo does not say of those it traces."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType
from typing import Any

import torch

from cpulaunch.records.record import record
from cpulaunch.worker.tensors.compare import exact_check
from cpulaunch.worker.tensors.mutation import others_may_draw

_frames: Any = torch._C._dynamo.eval_frame


def hide_from_dynamo(function: Any) -> None:
    """Effect: the program's own torch.compile skips this function and compiles what it calls."""
    if hasattr(_frames, "skip_code"):  # torch 2.5
        _frames.skip_code(function.__code__)
    elif hasattr(_frames, "set_code_exec_strategy"):
        skip, default = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, default))


@contextmanager
def _wrapped(owner: Any, around: Any) -> Iterator[None]:
    """Effect: inside the context, this thread calls `around` instead of the function of its name, which it is given."""
    plain, thread = getattr(owner, around.__name__), threading.get_ident()

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(plain, *args, **kwargs) if threading.get_ident() == thread else plain(*args, **kwargs)

    setattr(owner, around.__name__, call)
    try:
        yield
    finally:
        setattr(owner, around.__name__, plain)


LIBRARIES = ("torch", "transformers", "cpulaunch")
"""Packages that ask whether torch compiles, or for variables, for the sake of checks, warnings and debugging only."""

PURE = ("einops",)
"""Packages whose functions that Dynamo is not to look into (`allow_in_graph`) depend on their arguments alone."""

CLOSED = ("flat_apply", "invoke_leaf_function", "trampoline_autograd_apply")
"""Beginnings of the names of functions of torch's that call one that Dynamo is not to look into: one that is marked as
`nonstrict_trace` or as `leaf_function`, or an autograd function that is marked as `allow_in_graph`."""

COMPILING = ("is_compiling", "is_dynamo_compiling", "is_exporting")
"""Functions that Dynamo takes for True, as which a program may leave out what its eager calls do."""

DISTRIBUTED = ("is_initialized", "get_rank", "get_world_size")
"""Functions of torch.distributed whose answers Dynamo takes for constant."""

ENVIRONMENT = frozenset(("environ", "environb", "getenv", "getenvb"))


@record
class Answer:
    """What a function without arguments returned when it was traced."""

    function: Callable[[], object]
    value: object

    def holds(self) -> bool:
        """Whether the function returns the same now."""
        try:
            return self.function() == self.value
        except (RuntimeError, ValueError):  # The process group that was asked about is gone.
            return False


@contextmanager
def answered_as_in_eager_calls() -> Iterator[set[Answer]]:
    """The answers that Dynamo takes for constant, in this thread, inside the context.

    Effect: it tells the program that nothing is compiled, as what it computes is to be that of its eager calls.
    Source: torch/_dynamo/variables/torch.py, tracing_state_functions and constant_fold_functions.
    """
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable as Kind

    answers: set[Answer] = set()
    distributed = [getattr(torch.distributed, name, None) for name in DISTRIBUTED]

    def call_function(plain: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not args and not kwargs:
            if getattr(self.value, "__name__", "") in COMPILING and not _is_asked_by_library(tx):
                return ConstantVariable.create(False)
            if self.value in distributed:
                answers.add(Answer(function=self.value, value=self.value()))
        return plain(self, tx, args, kwargs)

    with _wrapped(Kind, call_function):
        yield answers


@contextmanager
def untraced_functions() -> Iterator[set[str]]:
    """The functions of the program that Dynamo calls, in this thread, inside the context, but does not look into.

    They are marked as `allow_in_graph` or as `assume_constant_result`, for example: what they read besides their
    arguments is not guarded. Source: torch/_dynamo/trace_rules.py, lookup_callable; torch/_dynamo/decorators.py.
    """
    from torch._dynamo.trace_rules import is_callable_allowed
    from torch._dynamo.variables import functions, nn_module
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable as Kind

    names: set[str] = set()

    def note(function: Any, *, is_marked: bool) -> None:
        if is_marked and not _is_of_library(function):
            names.add(getattr(function, "__qualname__", type(function).__qualname__))

    def call_function(plain: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        note(self.value, is_marked=is_callable_allowed(self.value))
        return plain(self, tx, args, kwargs)

    def invoke_and_store_as_constant(plain: Any, tx: Any, fn: Any, name: Any, args: Any, kwargs: Any) -> Any:
        note(fn, is_marked=getattr(fn, "_dynamo_marked_constant", False))
        return plain(tx, fn, name, args, kwargs)

    constants = [_wrapped(module, invoke_and_store_as_constant) for module in (functions, nn_module)]
    with _wrapped(Kind, call_function), constants[0], constants[1]:
        yield names


def _is_of_library(function: Any) -> bool:
    """Whether this is a function that a library has under the name that the function says is its own.

    `functools.wraps` copies the name from another function, except to classes and to what is written in C++.
    """
    function = getattr(function, "__func__", function)
    if _package(getattr(function, "__module__", None)) not in (*LIBRARIES, *PURE):
        return False
    if isinstance(function, type | BuiltinFunctionType | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    found: Any = sys.modules.get(function.__module__)
    for name in getattr(function, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is function or getattr(found, "__wrapped__", None) is function  # It may have a cache.


def _is_asked_by_library(tx: Any) -> bool:
    """Whether code of a library makes the call that Dynamo is at, itself or by a function that only passes it on."""
    while tx.f_code.co_name.startswith("is_") and getattr(tx, "parent", None) is not None:
        tx = tx.parent
    return _package(tx.f_globals.get("__name__")) in LIBRARIES


def reads_environment() -> bool:
    """Whether the program's code that Dynamo has traced for the present graph names environment variables."""
    context: Any = torch._guards.TracingContext.try_get()
    inlined = [code for code in getattr(context, "previously_inlined_functions", ()) if isinstance(code, CodeType)]
    readers = [code for code in inlined if ENVIRONMENT.intersection(code.co_names) and not _is_of(code, os)]
    if not readers:
        return any(_is_of(code, os) for code in inlined)  # By another name.
    return not all(any(_is_of(code, sys.modules.get(name)) for name in LIBRARIES) for code in readers)


def _is_of(code: CodeType, package: Any) -> bool:
    """Whether the code is of this module, or of this package."""
    path = str(getattr(package, "__file__", None))
    if path.endswith("__init__.py"):
        return code.co_filename.startswith(path.removesuffix("__init__.py"))
    return code.co_filename in (path, f"<frozen {package.__name__}>") if package is not None else False


def lost_effect(graph: torch.fx.GraphModule) -> str:
    """What a graph does, or depends on, besides what it computes, which is lost where it is frozen (empty: nothing).

    An assertion is a node without a result, unless `assert_by_results` has replaced it. So is a call of an operator of
    the program's that returns nothing, unless it writes to a tensor.
    """
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]  # As of a checkpoint.
    for node in (node for part in parts for node in part.graph.nodes if node.op == "call_function"):
        if "assert" in getattr(node.target, "__name__", str(node.target)):
            return "an assertion about the values of a tensor"
        if node.target is getattr and node.args[1] == "_base":
            return "whether a tensor is a view"
        if _is_closed(node.target):
            return "what a function depends on that Dynamo is not to look into"
        if any(_is_for_its_effect(schema, is_used=bool(node.users)) for schema in _schemas(node.target)):
            return f"the operator {node.target}, of which nothing is used"
    return ""


ASSERTIONS = (torch._assert_async, torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)


def assert_by_results(graph: torch.fx.GraphModule) -> int:
    """How many results the graph has behind its own now: one, not zero in all its elements, for each assertion.

    Effect: they take the place of the assertions that tensors are not zero. Each is computed where its assertion was:
    what it is about may be written to afterwards.
    """
    conditions = []
    for node in [each for each in graph.graph.nodes if each.op == "call_function" and each.target in ASSERTIONS]:
        if node.args and isinstance(node.args[0], torch.fx.Node):
            with graph.graph.inserting_before(node):
                conditions.append(graph.graph.call_function(torch.ne, (node.args[0], 0)))
            graph.graph.erase_node(node)
    output = next(iter(reversed(graph.graph.nodes)))
    output.args = ((*output.args[0], *conditions),)
    graph.recompile()
    return len(conditions)


def reads_numbers() -> bool:
    """Whether the call that is being traced reads numbers out of tensors, as by `item()`.

    Dynamo computes with them as with real numbers, without NaN, overflow and division by zero, and leaves out what
    follows from its sums: assertions, and branches that a program takes for NaN.
    """
    from torch.fx.experimental.symbolic_shapes import SymT, symbol_is_type

    shapes: Any = torch._guards.TracingContext.get().fake_mode.shape_env
    numbers = (SymT.FLOAT, SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
    return any(symbol_is_type(symbol, numbers) for symbol in shapes.var_to_range)


def guard_results() -> None:
    """Effect: the values that the traced call returns are guarded, too, where it only hands them on.

    Dynamo's bytecode would read them anew at each call, as those of closures. Source:
    torch/_dynamo/variables/lazy.py, LazyVariableTracker.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import LazyVariableTracker

    LazyVariableTracker.realize_all(InstructionTranslator.current_tx().stack)


def guard_attributes(variable: Any, names: Iterable[str]) -> None:
    """Effect: the values that these attributes of Dynamo's variable have now are guarded."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    for name in names:
        is_plain = type(getattr(variable.value, name)) in (int, float, str, bool, type(None))
        kind = GuardBuilder.CONSTANT_MATCH if is_plain else GuardBuilder.ID_MATCH
        install_guard(AttrSource(variable.source, name).make_guard(kind))


COMPARING = ("CONSTANT_MATCH", "CONSTANT_SUBCLASS_MATCH", "EQUALS_MATCH")
COMPARING_KEYS = ("DICT_CONST_KEYS", "DICT_KEYS", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK")
"""Dynamo's guards that compare a value with `==`, and those that compare the keys of a mapping so."""


@contextmanager
def exact_guards() -> Iterator[None]:
    """Effect: guards that this thread makes inside the context tell 0.0 from -0.0, and (1,) from (1.0,) and (True,).

    Dynamo's compare values with `==`, and their types, but not the types of what is in them; and no order of keys for
    `list(mapping)`, of which only those of `keys()` are in order. Source: torch/_dynamo/guards.py,
    GuardBuilder.EQUALS_MATCH; torch/csrc/dynamo/guards.cpp, EQUALS_MATCH; torch/_dynamo/variables/dicts.py.
    """
    from torch._dynamo.variables import ConstDictVariable, ListVariable
    from torch._guards import Guard

    def create(plain: Any, guard: Any, builder: Any) -> Any:
        created, kind = plain(guard, builder), guard.inner_create_fn().__name__
        if kind in (*COMPARING, *COMPARING_KEYS):
            _guard_exactly(guard, builder, has_keys=kind in COMPARING_KEYS)
        return created

    def read_in_order(tx: Any, variable: Any) -> None:
        if isinstance(variable, ConstDictVariable) and issubclass(variable.python_type(), dict):
            variable.call_method(tx, "keys", [], {})

    def unpack_var_sequence(plain: Any, variable: Any, tx: Any) -> Any:
        read_in_order(tx, variable)
        return plain(variable, tx)

    def call_method(plain: Any, variable: Any, tx: Any, name: str, args: Any, *rest: Any) -> Any:
        if name == "extend":
            read_in_order(tx, next(iter(args), None))
        return plain(variable, tx, name, args, *rest)

    with (
        _wrapped(Guard, create),
        _wrapped(ConstDictVariable, unpack_var_sequence),
        _wrapped(ListVariable, call_method),  # `list(mapping)`, since torch 2.13.
    ):
        yield


def _guard_exactly(guard: Any, builder: Any, *, has_keys: bool) -> None:
    """Effect: adds a guard to one that compares a value, or the keys of one, if others may be equal to them."""
    takes_name = "name" in inspect.signature(builder.get).parameters  # Torch 2.8.
    value, manager = builder.get(guard.name if takes_name else guard), builder.get_guard_manager(guard)
    if not has_keys:
        _add_check(guard, manager, exact_check(value))
    elif isinstance(value, MappingProxyType):
        is_same = exact_check(tuple(value))
        _add_check(guard, manager, is_same and (lambda now: is_same(tuple(now))))
    elif hasattr(manager, "get_key_manager"):  # The order of the keys counts: their own values do, too.
        _guard_keys_exactly(guard, manager, value)


def _guard_keys_exactly(guard: Any, manager: Any, value: Any) -> None:
    from torch._dynamo.guards import GuardManagerType

    for index, key in enumerate(dict.keys(value)):
        is_same = exact_check(key)
        if is_same is not None:
            source = f"list(dict.keys({guard.name}))[{index}]"
            _add_check(guard, manager.get_key_manager(index, source, key, GuardManagerType.GUARD_MANAGER), is_same)


def _add_check(guard: Any, manager: Any, is_same: Callable[[Any], bool] | None) -> None:
    if is_same is None:
        return
    text = f"{guard.name} is the same, not only equal"
    try:
        manager.add_lambda_guard(is_same, [text], guard.user_stack)
    except TypeError:  # Torch 2.8.
        manager.add_lambda_guard(is_same, [text])


def enters_autocast(graph: torch.fx.GraphModule) -> bool:
    """Whether the traced call itself computes some of its operations in autocast."""
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes if node.op == "call_function"]
    entered = [node.args for node in nodes if getattr(node.target, "__name__", "") == "_enter_autocast"]
    return any(device == "cpu" and enabled for device, _, enabled, *_ in entered)


def _is_closed(target: object) -> bool:
    """Whether a node calls a function of the program's whose body is no part of the graph.

    See `untraced_functions`, which names most of them.
    """
    if getattr(target, "__name__", "").startswith(CLOSED):
        return True
    return isinstance(target, FunctionType) and _package(target.__module__) not in (*LIBRARIES, *PURE)


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


def _is_for_its_effect(schema: Any, *, is_used: bool) -> bool:
    """Whether an operator is called for something else than its result or what it writes to tensors."""
    if schema.is_mutable or (is_used and schema.returns):
        return False
    return not schema.returns or schema.name.partition("::")[0] not in ("aten", "prims")


def _schemas(target: Any) -> list[Any]:
    """The schemas of an operator; empty for other functions."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    return [target._schema] if isinstance(target, torch._ops.OpOverload) else []


@contextmanager
def others_draws_kept() -> Iterator[None]:
    """Effect: inside the context, Dynamo does not rewind torch's random number generator where other threads may draw.

    Source: torch/_dynamo/convert_frame.py, preserve_global_state.
    """
    had_others = others_may_draw()

    def set_rng_state(plain: Any, new_state: torch.Tensor) -> None:
        if not (had_others or others_may_draw()):
            plain(new_state)

    with _wrapped(torch.random, set_rng_state):
        yield


STATIC = "_dynamo_static_input_type"


@contextmanager
def unmarked(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Effect: after the context, tensors have no mark that Dynamo gave them in it, with which they would be pickled.

    Source: torch/_dynamo/decorators.py, mark_static_address.
    """
    own = [tensor for tensor in tensors if STATIC not in tensor.__dict__]
    try:
        yield
    finally:
        for tensor in own:
            tensor.__dict__.pop(STATIC, None)
