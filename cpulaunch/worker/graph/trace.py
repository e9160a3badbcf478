"""One call of a module traced by Dynamo: a graph of torch operations, and the guards under which it holds.

The guards name everything that the graph depends on besides the elements of tensors (attributes, globals, shapes,
types, training and grad mode, hooks) and are checked in microseconds. Capture uses Dynamo's graph but not its bytecode,
so a call that changes Python objects is refused.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cpulaunch.records.record import record, replace
from cpulaunch.worker.graph.dynamo import (
    Answer,
    answered_as_in_eager_calls,
    assert_by_results,
    exact_guards,
    guard_attributes,
    guard_results,
    lost_effect,
    others_draws_kept,
    reads_environment,
    reads_numbers,
    unmarked,
    untraced_functions,
)
from cpulaunch.worker.graph.silent_logging import (
    SilentCall,
    dynamo_logs_off,
    silent_calls_left_out,
    silent_warnings,
)
from cpulaunch.worker.tensors.aliasing import shared_object
from cpulaunch.worker.tensors.mutation import OwnResultsOnly, WrittenError
from cpulaunch.worker.tensors.owners import own_view
from cpulaunch.worker.tensors.pytree import Spec, UnknownStructureError, flatten
from cpulaunch.worker.tensors.references import allow_swaps


class RefusedError(Exception):
    """A call cannot be captured; the message is the reason shown to the user."""


@record
class ResultSource:
    """Where a tensor of a call's result comes from: output `index` of the graph, or input `index` of the call."""

    index: int
    is_input: bool


@record
class TracedCall:
    """One call as a graph: `graph(*arguments)` returns a tuple of tensors, the last `asserted` of which must be true.

    `sources`: for each argument of the graph, the index of an input of the call or a frozen tensor. `spec`: structure
    of the result. `results`: where each tensor of the result comes from. `low`: one of these is bf16 or fp16. `silent`:
    the calls of loggers that are left out because they wrote nothing. `answers`: of functions that were taken for
    constant. `code` keeps the guards alive.
    """

    graph: torch.fx.GraphModule
    sources: tuple[int | Tensor, ...]
    spec: Spec
    results: tuple[ResultSource, ...]
    low: bool
    guards: Any
    code: types.CodeType
    silent: frozenset[SilentCall] = frozenset()
    answers: frozenset[Answer] = frozenset()
    asserted: int = 0

    def has_relative_views(self) -> bool:
        """Whether each view is at a fixed distance from the tensor it is taken of, wherever that one begins."""
        return not any("as_strided" in str(node.target) for node in self.graph.graph.nodes)


def _template(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


def trace_call(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    inputs: list[Tensor],
    frozen: list[Tensor],
    eager: object,
) -> TracedCall:
    """The call as a graph with its guards.

    `inputs`: the tensors among the arguments; `frozen`: tensors that may become constants; `eager`: the eager result.
    Raises: RefusedError.
    """
    if any(map(_skips_padding, module.modules())):
        raise RefusedError("its TransformerEncoder skips padding, which a graph cannot do")
    # A new code object: Dynamo keeps guards, and counts recompilations, by code object.
    function = types.FunctionType(_template.__code__.replace(co_name="captured_call"), globals())
    with (
        silent_warnings(),
        _dynamo_settings(),
        dynamo_logs_off(),
        unmarked(inputs + frozen),
        others_draws_kept(),
        exact_guards(),
        silent_calls_left_out() as silent,
        answered_as_in_eager_calls() as answers,
        untraced_functions() as untraced,
    ):
        recorder = _Recorder(inputs + frozen, untraced)
        try:
            result = _compiled(function, recorder)(module, args, kwargs)
            shared = shared_object(eager, result)
            if shared:
                raise RefusedError(f"it returns {shared}")
            traced = _traced_call(recorder, result, function.__code__, inputs=inputs, frozen=frozen)
            return replace(traced, silent=frozenset(silent), answers=frozenset(answers))
        except RefusedError:
            _drop_guards(recorder.context)
            raise
        finally:
            _drop_weak_references(recorder.graph)
            recorder.release()
            allow_swaps()


def _drop_weak_references(graph: torch.fx.GraphModule | None) -> None:
    """Effect: the fake tensors in the graph no longer refer to real ones, which torch could not swap otherwise.

    Source: torch/_subclasses/meta_utils.py, MetaTensorDescriber; torch/utils/__init__.py, swap_tensors.
    """
    values = [] if graph is None else [node.meta.get("example_value") for node in graph.graph.nodes]
    with suppress(AttributeError, AssertionError):  # Other versions of torch.
        mode: Any = torch._guards.detect_fake_mode(values)
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def _drop_guards(context: Any) -> None:
    """Effect: the guards of a graph that is not used refer to no tensor, which they would until a garbage collection.

    Source: torch/_guards.py, TracingContext.
    """
    with suppress(AttributeError):  # Other versions of torch.
        context.tensor_to_context.clear()
        for guard in context.guards_context.dynamo_guards.inner:
            guard.create_fn = None


def _skips_padding(part: nn.Module) -> bool:
    """Whether this is torch's encoder with nested tensors, which returns zeros at padded positions, but not in Dynamo.

    Source: torch/nn/modules/transformer.py, TransformerEncoder.forward.
    """
    return isinstance(part, nn.TransformerEncoder) and bool(getattr(part, "use_nested_tensor", False))


def _traced_call(
    recorder: _Recorder,
    result: object,
    code: types.CodeType,
    *,
    inputs: list[Tensor],
    frozen: list[Tensor],
) -> TracedCall:
    if recorder.graph is None or recorder.outputs is None:
        raise RefusedError("it computes nothing with tensors")
    spec, results, tensors = _match_results(result, recorder.outputs, inputs)
    return TracedCall(
        graph=recorder.graph,
        sources=_match_sources(recorder, inputs, frozen),
        spec=spec,
        results=results,
        low=any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors),
        guards=_guards(code),
        code=code,
        asserted=recorder.asserted,
    )


class _Recorder:
    """A Dynamo backend that records the graph with the arguments and outputs of its first run.

    `asserted`: how many results the graph has behind these outputs, for what it asserts about values.
    `foreign`: tensors that the graph must not write to. `untraced`: functions that Dynamo has not looked into. Dynamo
    keeps every backend until the process exits.
    """

    def __init__(self, foreign: list[Tensor], untraced: Collection[str]) -> None:
        self._foreign, self._untraced = foreign, untraced
        self.graph: torch.fx.GraphModule | None = None
        self.context: Any = None
        self.arguments: tuple[Any, ...] = ()
        self.outputs: tuple[Any, ...] | None = None
        self.asserted = 0

    def __call__(self, graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        self.graph, self.context = graph, torch._guards.TracingContext.try_get()
        effects = _side_effects()
        if effects:  # Refused here, because Dynamo's bytecode would repeat the changes.
            raise RefusedError(f"it changes {effects}")
        guard_results()
        if reads_numbers():
            raise RefusedError("it reads numbers out of tensors, whose values would not all be noticed")
        self.asserted = assert_by_results(graph)
        lost = lost_effect(graph) or ("an environment variable" if reads_environment() else "")
        if self._untraced:
            lost = f"what {min(self._untraced)}() depends on, which Dynamo is not to look into"
        if lost:
            raise RefusedError(f"its graph would not contain {lost}")
        results = [node.meta.get("example_value") for node in graph.graph.nodes]
        if any(map(_depends_on_values, pytree.tree_leaves(results))):  # TorchScript would make it a constant.
            raise RefusedError("its shapes or views depend on the values of a tensor")

        def run(*arguments: Any) -> tuple[Any, ...]:
            self.arguments = arguments
            try:
                with OwnResultsOnly(self._foreign):
                    results = tuple(self.graph(*arguments)) if self.graph is not None else ()
                    outputs = self.outputs = results[: len(results) - self.asserted]
            except WrittenError as error:
                raise RefusedError(f"it changes an argument or its own tensors in place ({error})") from None
            return outputs

        return run

    def release(self) -> None:
        """Effect: releases the graph and its tensors."""
        self.graph, self.context, self.outputs, self.arguments, self._foreign = None, None, None, (), []


def _depends_on_values(value: object) -> bool:
    """Whether the result of an operation has a size or a place in memory that is not the same for all values."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return any(isinstance(part, torch.SymInt) for part in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _compiled(function: Callable[..., Any], recorder: _Recorder) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, backend=recorder, fullgraph=True, dynamic=False)

    def call(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except Exception as error:  # noqa: BLE001  Dynamo raises errors of many types; each is a refusal.
            raise _refused(error) from None

    return call


def _refused(error: BaseException | None) -> RefusedError:
    """The RefusedError that an exception of Dynamo wraps, or a new one with its message."""
    outer = error
    while error is not None:
        if isinstance(error, RefusedError):
            return error
        error = getattr(error, "inner_exception", None) or error.__cause__
    return RefusedError(f"Dynamo: {_summary(outer)}")


def _summary(error: BaseException | None) -> str:
    """The title and explanation in one of Dynamo's many-line messages, on one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    title = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    explanations = (line.removeprefix("Explanation:") for line in lines if line.startswith("Explanation:"))
    return " ".join(": ".join([title.rstrip(".:"), *list(explanations)[:1]]).split())[:300]


def _dynamo_settings() -> Any:
    """A context in which Dynamo guards hooks too and takes recurrent layers; earlier compilations have no influence."""
    import torch._dynamo.config as config

    settings = {"skip_nnmodule_hook_guards": False, "automatic_dynamic_shapes": False, "suppress_errors": False}
    if hasattr(config, "allow_rnn"):  # Since torch 2.6.
        settings["allow_rnn"] = True
    return config.patch(settings)


def _side_effects() -> str:
    """The existing Python objects that the traced call changes, as text; empty if none.

    Source: torch/_dynamo/side_effects.py: objects created by the call itself are "new" and do not count.
    """
    from torch._dynamo.side_effects import AttributeMutationNew
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import base

    new_value = base.ValueMutationNew if hasattr(base, "ValueMutationNew") else base.MutableLocal  # torch 2.5
    effects = InstructionTranslator.current_tx().output.side_effects
    if effects.tensor_hooks:
        return "tensor hooks"
    changed = [
        item
        for item in effects.id_to_variable.values()
        if not isinstance(_mutation(item), AttributeMutationNew | new_value)
        and effects.is_modified(item)
        and not _is_restored(item, effects)
    ]
    return ", ".join(sorted({_name(item) for item in changed}))


def _mutation(item: Any) -> Any:
    """How the traced call may change this object."""
    return item.mutation_type if hasattr(item, "mutation_type") else item.mutable_local  # torch 2.5


def _is_restored(item: Any, effects: Any) -> bool:
    """Whether the object has its old values again, as after code that sets a flag and resets it.

    Effect: guards them.
    """
    stored = effects.store_attr_mutations.get(item) or effects.store_attr_mutations.get(_mutation(item))  # torch 2.5
    base = getattr(item, "is_base_vt_modified", None)
    if not stored or (base is not None and base(effects)):
        return False
    value = getattr(item, "value", None)  # Of a list of tensors, it raises an error.
    is_restored = value is not None and all(
        new.is_python_constant() and _same(vars(value).get(name, stored), new.as_python_constant())
        for name, new in stored.items()
    )
    if is_restored:
        guard_attributes(item, stored)
    return is_restored


def _same(old: object, new: object) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, int | str | float) and repr(old) == repr(new))


def _name(item: Any) -> str:
    """The changed object in the user's terms.

    Source: torch/_dynamo/source.py: names are expressions such as L['module'].calls or G['counter'].
    """
    name = getattr(getattr(item, "source", None), "name", "")
    text = str(name() if callable(name) else name)
    if text.startswith(("L['args']", "L['kwargs']")):
        return "an argument"
    if text.startswith("G["):
        return f"the global {text.removeprefix('G[').partition(']')[0]}"
    if not text.startswith("L['module']"):
        return "an object"
    path = re.sub(r"_modules\['(\w+)'\]", r"\1", text.removeprefix("L['module']")).lstrip(".")
    return f"the module's {path}" if path else "attributes of the module"


def _guards(code: types.CodeType) -> Any:
    """Dynamo's guards for the call. Raises: RefusedError if there are none, or several."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = _debug_get_cache_entry_list(code)
    if len(entries) != 1:
        raise RefusedError("Dynamo is disabled" if not entries else "Dynamo needed several graphs")
    return entries[0].guard_manager if hasattr(entries[0], "guard_manager") else entries[0].check_fn  # torch 2.5


def _match_sources(recorder: _Recorder, inputs: list[Tensor], frozen: list[Tensor]) -> tuple[int | Tensor, ...]:
    position = {id(tensor): index for index, tensor in reversed(list(enumerate(inputs)))}
    constant = {id(tensor) for tensor in frozen}
    sources: list[int | Tensor] = []
    for argument in recorder.arguments:
        if id(argument) in position:
            sources.append(position[id(argument)])
        elif id(argument) in constant:
            sources.append(own_view(argument))
        else:
            what = "a tensor" if isinstance(argument, Tensor) else f"a value of type {type(argument).__name__}"
            raise RefusedError(f"it reads {what} that is neither an argument nor part of the module")
    if not any(isinstance(source, int) for source in sources):
        raise RefusedError("its result does not depend on a tensor argument")
    return tuple(sources)


def _match_results(
    result: object, outputs: tuple[Any, ...], inputs: list[Tensor]
) -> tuple[Spec, tuple[ResultSource, ...], tuple[Tensor, ...]]:
    tensors: list[Tensor] = []
    try:
        spec = flatten(result, tensors)
    except UnknownStructureError as error:
        raise RefusedError(f"it returns {error}") from None
    computed = {id(tensor): index for index, tensor in enumerate(outputs)}
    given = {id(tensor): index for index, tensor in enumerate(inputs)}
    sources = []
    for tensor in tensors:
        is_input = id(tensor) not in computed
        index = (given if is_input else computed).get(id(tensor))
        if index is None:
            raise RefusedError("it returns a tensor that it did not compute")
        sources.append(ResultSource(index=index, is_input=is_input))
    return spec, tuple(sources), tuple(tensors)
