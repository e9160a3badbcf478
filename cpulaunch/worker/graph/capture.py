"""Captures one call of a module: traces it, compiles it and compares its result with that of eager execution."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cpulaunch.records.record import record
from cpulaunch.worker.fusion.portable import Function
from cpulaunch.worker.fusion.search import TrialOutcome
from cpulaunch.worker.fusion.trials import Trials
from cpulaunch.worker.graph.dynamo import enters_autocast
from cpulaunch.worker.graph.onednn import Frozen, UnboundedError, compile_graph, freeze
from cpulaunch.worker.graph.precision import Mode, Precision
from cpulaunch.worker.graph.silent_logging import are_silent
from cpulaunch.worker.graph.trace import RefusedError, TracedCall, trace_call
from cpulaunch.worker.graph.weights import Weights, contained
from cpulaunch.worker.reporting.events import text_of
from cpulaunch.worker.tensors.aliasing import View, sharing_differs, views
from cpulaunch.worker.tensors.compare import LOW_PRECISION, ROUNDING, largest_error
from cpulaunch.worker.tensors.mutation import random_state, restore_random_state, storage_of
from cpulaunch.worker.tensors.pytree import Spec, UnknownStructureError, flatten, rebuild, without_constants

RECURRENT = re.compile(r" = aten::(?:lstm|gru|rnn_tanh|rnn_relu)\(")
"""Layers whose operands autocast converts for each of their products, which a trace does not show."""


class MismatchError(Exception):
    """A captured call gave a different result from the eager call."""


class PendingError(Exception):
    """A call cannot be captured yet: the same graph is being compiled in a process of its own, to see if it crashes."""


@record
class Call:
    """One call of a module: its arguments, and the tensors among them. `spec`: their structure without these.

    None: the arguments are tensors alone. `seconds`: the shortest duration of eager calls of its kind; 0 if unknown.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    spec: Spec | None = None
    seconds: float = 0.0


@record
class Captured:
    """A captured call.

    `run` gives the result of a call; `holds` says whether the capture is valid for it. `error`: largest absolute
    difference from the eager result. `seconds`: duration of the capture. `bytes`: memory of its constants.
    `saved_seconds`: by how much a call is shorter than an eager one. `accepts` says whether the graph is right for the
    values of these inputs, which `run` may find out too: it then raises UnboundedError.
    """

    run: Callable[[Call], Any]
    holds: Callable[[Call], bool]
    error: float
    seconds: float
    bytes: int
    low_precision: bool
    saved_seconds: float = 0.0
    accepts: Callable[[list[Tensor]], bool] = lambda inputs: True


@record
class _Prepared:
    """A traced call whose graph need only be compiled.

    `views`: the results that are views of an input or another result, by their positions in both together. `low`: it
    computes in bf16 or fp16.
    """

    traced: TracedCall
    spec: Spec
    views: dict[int, View]
    frozen: Frozen
    low: bool
    holds: Callable[[Call], bool]
    outcome: Callable[[Call], TrialOutcome | None]
    seconds: float


FAST_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that run kernels of their own in eval mode, which Dynamo does not trace."""

UNFUSED_RUNS = 3
"""Runs of a captured call that take as long as eager ones: two that trace it, and the graph's first, for a profile."""

MAX_PREPARED = 8
"""Calls of a module that wait for the helper process; the oldest is forgotten, and prepared again when it recurs."""

_prepared: weakref.WeakKeyDictionary[Weights, list[_Prepared]] = weakref.WeakKeyDictionary()
"""Calls whose graphs are being tried in the helper process, by the weights they are frozen with."""


def capture(call: Call, eager: Any, weights: Weights, precision: Precision, trials: Trials) -> Captured:
    """The call captured by oneDNN Graph and compared once with `eager`, its eager result.

    Raises: PendingError, RefusedError if a capture is not safe, MismatchError if its result is different, and any error
    of torch.
    """
    started = time.perf_counter()
    waiting = _prepared.setdefault(weights, [])
    with preserved_random_state():
        prepared = next((each for each in waiting if each.holds(call)), None)
        if prepared is None:
            refusal = trials.refusal(UNFUSED_RUNS * call.seconds)
            if refusal is not None:
                raise RefusedError(refusal)
            prepared = _prepare(call, eager, weights, precision, trials)
            waiting.append(prepared)
            del waiting[:-MAX_PREPARED]
        frozen = prepared.frozen
        if not frozen.accepts(call.inputs):
            raise PendingError("NaN may be lost in a call with these inputs")
        outcome = prepared.outcome(call)
        if outcome is None:
            raise PendingError("its graph is being tried in another process")
        waiting.remove(prepared)
        if outcome.refusal is not None:
            raise RefusedError(outcome.refusal)
        outputs_of = compile_graph(frozen, outcome.left_out, call.inputs)
        try:
            run, graph = _with_fresh_results(call, prepared, outputs_of)
        except UnboundedError as unbounded:
            raise RefusedError(f"its graph may give wrong results: {unbounded}") from None
        _check_sharing(call, weights, eager, graph, run(call))
        error = check(eager, graph, low_precision=prepared.low)
    return Captured(
        run=run,
        holds=prepared.holds,
        error=error,
        seconds=time.perf_counter() - started + prepared.seconds,
        bytes=prepared.frozen.bytes,
        low_precision=prepared.low,
        accepts=frozen.accepts,
    )


def prepared_bytes() -> int:
    """Memory of the graphs that are being tried in the helper process, besides the modules' own."""
    return sum(each.frozen.bytes for waiting in list(_prepared.values()) for each in waiting)


def is_prepared(call: Call, weights: Weights | None) -> bool:
    """Whether the call is traced, with these weights, and its graph is being tried or need only be compiled."""
    return weights is not None and any(each.holds(call) for each in tuple(_prepared.get(weights, ())))


def is_being_tried(call: Call, weights: Weights | None) -> bool:
    """Whether the call is traced, with these weights, and it is not known yet whether its graph can be compiled."""
    waiting = () if weights is None else tuple(_prepared.get(weights, ()))
    return any(each.holds(call) and each.outcome(call) is None for each in waiting)


def forget_prepared(weights: Weights | None) -> None:
    """Effect: calls that wait for the helper process, with these weights, will not be captured."""
    if weights is not None:
        _prepared.pop(weights, None)


def _prepare(call: Call, eager: Any, weights: Weights, precision: Precision, trials: Trials) -> _Prepared:
    started = time.perf_counter()
    others = contained(call.module, weights.tensors)
    known = [*weights.tensors, *(other.tensor for other in others)]
    traced = trace_call(call.module, call.args, call.kwargs, inputs=call.inputs, frozen=known, eager=eager)
    read = {storage_of(source) for source in traced.sources if isinstance(source, Tensor)}
    weights.watch([other for other in others if storage_of(other.tensor) in read])
    mode: list[Mode] = []

    def enter_precision(contexts: ExitStack) -> bool:
        mode.append(precision.enter(contexts, call.module, cache=False))
        return mode[0].widen

    try:
        frozen = freeze(
            traced.graph,
            traced.sources,
            call.inputs,
            enter_precision,
            replaces_attention=any(isinstance(part, FAST_ATTENTION) for part in call.module.modules()),
            asserted=traced.asserted,
        )
    except RuntimeError as error:
        if not traced.asserted:
            raise
        raise RefusedError(f"its graph with assertions cannot be traced: {text_of(error)}") from None
    if (mode[0].low or enters_autocast(traced.graph)) and RECURRENT.search(frozen.graph.text):
        raise RefusedError("autocast converts tensors inside its recurrent layers, which a trace does not show")
    left_out = frozen.safeguards.left_out
    return _Prepared(
        traced=traced,
        spec=_eager_spec(eager, traced.spec),
        views=views(call.inputs, _parts(eager)[1]) if traced.has_relative_views() else {},
        frozen=frozen,
        outcome=lambda call: trials.outcome(frozen.graph, frozen.inputs_of(call.inputs), left_out),
        low=mode[0].low or traced.low,
        holds=_guard_check(traced),
        seconds=time.perf_counter() - started,
    )


def _with_fresh_results(call: Call, prepared: _Prepared, outputs_of: Function) -> tuple[Callable[[Call], Any], Any]:
    """A function that runs the graph for a call, and its first result.

    Results that are constants of the graph are copied at every call, because the program may change them.
    """
    first, second = ([*map(storage_of, outputs)] for outputs in [outputs_of(*call.inputs) for _ in range(2)])
    given = {storage_of(tensor) for tensor in call.inputs} | {0}
    constant = [index for index, storage in enumerate(second) if storage in first and storage not in given]
    if constant:
        outputs_of = _copying(outputs_of, frozenset(constant))
    run = _runner(prepared, outputs_of, len(call.inputs))
    return run, run(call)


def _copying(outputs_of: Function, constant: frozenset[int]) -> Function:
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            output.clone() if index in constant else output for index, output in enumerate(outputs_of(*inputs))
        )

    return run


def _guard_check(traced: TracedCall) -> Callable[[Call], bool]:
    """A function that says whether the traced graph is valid for a call."""
    check, silent, answers = traced.guards.check, traced.silent, traced.answers

    def holds(call: Call, alive: TracedCall = traced) -> bool:
        is_guarded = bool(check({"module": call.module, "args": call.args, "kwargs": call.kwargs}))
        return is_guarded and are_silent(silent) and all(answer.holds() for answer in answers)

    return holds


def _eager_spec(eager: Any, traced: Spec) -> Spec:
    """The structure of the result with the constants of the eager result, because Dynamo traced without autocast.

    These constants are as reliable as the graph: they depend only on what the guards check. Raises: MismatchError.
    """
    spec, _ = _parts(eager)
    if repr(without_constants(spec)) != repr(without_constants(traced)):
        raise MismatchError("the result has a different structure")
    return spec


def _runner(prepared: _Prepared, outputs_of: Function, inputs: int) -> Callable[[Call], Any]:
    """A function that runs the graph for a call and rebuilds the result from its outputs and the call's inputs.

    oneDNN Graph gives each output memory of its own; where the eager result has views, so has the captured one. A
    tensor that is returned in several places stays one tensor.
    """
    places = [(result.is_input, result.index) for result in prepared.traced.results]
    order = [index if is_input else inputs + places.index((False, index)) for is_input, index in places]
    made = [(position, prepared.views[position]) for position in prepared.views.keys() & order if position >= inputs]
    if prepared.spec == ("tensor",) and not places[0][0] and not made:
        index = places[0][1]
        return lambda call: outputs_of(*call.inputs)[index]

    def run(call: Call) -> Any:
        outputs = outputs_of(*call.inputs)
        tensors = [*call.inputs, *((call.inputs if is_input else outputs)[index] for is_input, index in places)]
        for position, view in made:
            tensors[position] = view.of(tensors[view.base])
        return rebuild(prepared.spec, [tensors[position] for position in order])

    return run


def _check_sharing(call: Call, weights: Weights, *results: Any) -> None:
    """Raises: RefusedError if results of the graph share memory differently from the eager result."""
    eager, graph, again = (_parts(result)[1] for result in results)
    difference = sharing_differs(eager, graph, again, inputs=call.inputs, frozen=weights.tensors)
    if difference:
        raise RefusedError(f"it returns {difference}")


def check(eager: Any, graph: Any, *, low_precision: bool) -> float:
    """The largest absolute difference of two results. Raises: MismatchError if they differ by more than rounding."""
    (spec, tensors), (other_spec, others) = _parts(eager), _parts(graph)
    if not _alike(spec, other_spec):
        raise MismatchError("the result has a different structure")
    error, reason = largest_error(tensors, others, LOW_PRECISION if low_precision else ROUNDING)
    if reason is not None:
        raise MismatchError(reason)
    return error


def _parts(value: Any) -> tuple[Spec, list[Tensor]]:
    tensors: list[Tensor] = []
    try:
        return flatten(value, tensors), tensors
    except UnknownStructureError as error:
        raise RefusedError(f"it returns {error}") from None


def _alike(spec: Spec, other: Spec) -> bool:
    try:
        return bool(spec == other)
    except (RuntimeError, ValueError, TypeError):  # The comparison of a pytree context need not give a truth value.
        return repr(spec) == repr(other)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Effect: restores the state of torch's random number generator when the context ends, see restore_random_state."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


MIN_ROUNDS, MAX_ROUNDS, TIMED_SECONDS = 2, 20, 0.2
"""How often a captured call is timed against an eager one, and for how many seconds in total.

A longer one is timed once, unless it is slower, for which other load of the machine may be the reason.
"""


def best_seconds(*runs: Callable[[], Any]) -> list[float]:
    """The shortest time of each function, in seconds, over rounds that run each of them once.

    The shortest, because other load of the machine only makes a run longer. One round is enough where the first
    function is the fastest one although a run takes longer than TIMED_SECONDS.
    """
    best = [float("inf")] * len(runs)
    end = time.perf_counter() + TIMED_SECONDS
    with preserved_random_state():
        for number in range(MAX_ROUNDS):
            for index, run in enumerate(runs):
                started = time.perf_counter()
                run()
                best[index] = min(best[index], time.perf_counter() - started)
            is_clear = max(best) > TIMED_SECONDS and best[0] == min(best)
            if (is_clear or number + 1 >= MIN_ROUNDS) and time.perf_counter() > end:
                break
    return best


DRAWS = "it draws random numbers"


def changes_tensors(call: Call, weights: Weights, eager: Callable[[], Any]) -> tuple[Any, str]:
    """The eager result, and why the call cannot be repeated (empty: it can): it changes tensors or the random state."""
    inputs = _versions(call.inputs)
    frozen = _versions(weights.tensors)
    random = torch.get_rng_state()
    result = eager()
    if not torch.equal(torch.get_rng_state(), random):
        return result, DRAWS
    if _versions(call.inputs) != inputs:
        return result, "it changes an argument in place"
    return result, "it changes its own tensors in place" if _versions(weights.tensors) != frozen else ""


def has_changed_arguments(call: Call) -> bool:
    """Whether an argument of a call that was made has another structure now, or other tensors, as a cache that grows.

    Dynamo finds that too, but after the seconds of a trace. Raises: what a type's own flatten function raises.
    """
    if call.spec is None:
        return False
    found: list[Tensor] = []
    try:
        spec = flatten((call.args, call.kwargs), found)
    except UnknownStructureError:
        return True
    return not (_alike(call.spec, spec) and [*map(id, found)] == [*map(id, call.inputs)])


def _versions(tensors: list[Tensor]) -> list[int]:
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
