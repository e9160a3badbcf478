"""Attempts to compile a graph, each in a process of its own, which a defect of the compiler may end."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cpulaunch.probe.cgroups import read_cgroups
from cpulaunch.probe.limits import free_memory
from cpulaunch.records.record import record, replace
from cpulaunch.system.libc import die_with_parent
from cpulaunch.system.root import Root
from cpulaunch.worker.fusion.exclusion import fusible, leave_out, observed_kinds
from cpulaunch.worker.fusion.math_settings import apply_math_settings
from cpulaunch.worker.fusion.outcomes import IDLE_FACTOR
from cpulaunch.worker.fusion.portable import (
    Function,
    PortableGraph,
    function_of,
    fusible_function_of,
    graph_of,
)
from cpulaunch.worker.fusion.search import ExhaustedError, TrialOutcome, search
from cpulaunch.worker.fusion.values import total_bytes, value_of

WARM_UP_CALLS = 2
"""The first call is profiled; the second fuses the graph and packs its weights."""

REPEATED_CALLS, REPEATED_SECONDS = 20, 0.1
"""More calls of a graph that ran, of which the shortest counts, and their seconds together.

One alone may write beyond a block of memory where the allocator does not see it.
"""


@record
class Rounding:
    """What may come of rounding. `tolerance`: the difference of a result from that of the graph unfused, relative to
    its largest element, beyond which it is something else. A worker compares more closely, with the elements it has.

    `moved`: the part of themselves by which inputs and weights are changed where a result is different. One that
    changes as much without fusion says nothing: it is zero but for rounding, or the place of a maximum.
    """

    tolerance: float
    moved: float


ROUNDING = Rounding(tolerance=0.01, moved=2.0**-16)
LOW_ROUNDING = Rounding(tolerance=0.1, moved=2.0**-8)
"""The latter for graphs that compute in bf16 or fp16."""

SLOWER, UNCERTAIN_SECONDS, FAR_BEYOND = 2.0, 0.01, 2.0
"""A graph is much slower than unfused if the shortest of its calls takes longer than so many times an unfused one and
so many seconds more. Calls beyond that are timed again, unless the shortest takes so many times as long even so.

Seen with torch 2.13: the product of attention in CaiT, whose operand is permuted, takes 150 ms instead of 1. A worker
measures more closely.
"""

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
"""Signals by which a process ends itself; others come from outside and say nothing about the graph."""

NO_RESOURCES = re.compile(r"allocate memory|bad_alloc|out[ _]of[ _]memory|MemoryError|temporarily unavailable", re.I)
"""Errors of this moment, which say nothing about the graph. Source: c10/core/CPUAllocator.cpp; errno(3), EAGAIN."""

MAX_ATTEMPTS = 60
POLL_SECONDS = 0.2
NEEDED_COPIES = 3
"""An attempt holds the weights, as many bytes of packed weights, and what the operations compute."""


class DifferentResultError(Exception):
    """A graph computes something else than the same graph unfused."""


class SlowerError(Exception):
    """A graph is much slower than the same graph unfused: oneDNN has no fast kernel for one of its operations."""


class Trial:
    """One graph being tried."""

    def __init__(self, fields: dict[str, Any], described: list[Any]) -> None:
        self._fields = fields
        self._described = described
        self._end = time.monotonic() + IDLE_FACTOR * float(fields["seconds"])
        self._attempts = 0
        self._known: dict[frozenset[int], str | None] = {}
        self._seconds: dict[frozenset[int], float] = {}
        self._spent, self._is_cut, self._rounding = 0.0, False, ROUNDING

    def outcome(self) -> TrialOutcome:
        """What is found about the graph, within its limits of time, memory and attempts.

        A search that the time limit ends is remembered with the processor time that it took: another one with the same
        limit need not be begun, but one after which a busy machine has left it more time need.
        """
        found = self._found()
        if not self._is_cut:
            return found
        return dataclasses.replace(found, lasting=True, cut_after=round(max(self._spent, 0.1), 1))

    def _found(self) -> TrialOutcome:
        needed = total_bytes(self._described) * NEEDED_COPIES
        if needed > available_bytes():
            return TrialOutcome(refusal=f"too little memory to try it ({needed >> 20} MiB are needed)", lasting=False)
        try:
            status, detail = self._in_process(lambda: observed_kinds(*self._built()))
        except ExhaustedError as error:
            return TrialOutcome(refusal=str(error), lasting=False)
        if status != "ok":
            return TrialOutcome(refusal=f"it cannot be tried: {detail}", lasting=False)
        if any("float16" in signature for signature in detail["signatures"]):
            self._rounding = LOW_ROUNDING
        groups, kinds = _groups(detail["signatures"]), _groups(detail["operands"])
        known = frozenset(detail["misread"]) | frozenset(detail["others"]) | frozenset(self._fields["left_out"])
        found = search(self._attempt, known, lambda: groups, lambda group: _all_that_meet(group, kinds))
        return dataclasses.replace(found, seconds=round(self._seconds.get(found.left_out, 0.0), 1))

    def _built(self) -> tuple[PortableGraph, list[Any]]:
        """The graph with its constants, and its inputs. Effect: allocates and fills them."""
        torch.set_num_threads(int(self._fields["threads"]))
        apply_math_settings(self._fields["math"])
        count = int(self._fields["inputs"])
        values = [value_of(each) for each in self._described]
        graph = PortableGraph(text=self._fields["text"], inputs=count, constants=tuple(values[count:]))
        return graph, values[:count]

    def _is_over(self) -> bool:
        return time.monotonic() > self._end

    def _attempt(self, left_out: frozenset[int]) -> str | None:
        if left_out not in self._known:
            if self._attempts >= MAX_ATTEMPTS:
                raise ExhaustedError(f"no way to compile it was found in {MAX_ATTEMPTS} attempts", lasting=True)
            self._attempts += 1
            status, detail = self._in_process(lambda: compile_and_run(*self._built(), left_out, self._rounding))
            self._known[left_out] = None if status == "ok" else str(detail)
            if status == "ok":
                self._seconds[left_out] = float(detail)
        return self._known[left_out]

    def _in_process(self, work: Callable[[], Any]) -> tuple[str, Any]:
        """("ok", the result) or ("failed", the reason) of this work in a forked process. Raises: ExhaustedError."""
        if self._is_over():
            raise self._out_of_time()
        reader, writer = os.pipe()
        helper = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reader)
            raise ExhaustedError(f"no process can be started to try it: {error}") from None
        finally:
            if os.getpid() == helper:
                os.close(writer)
        if pid == 0:
            _run_and_exit(work, writer, helper)
        try:
            return self._answer(reader, pid)
        finally:
            os.close(reader)

    def _answer(self, reader: int, pid: int) -> tuple[str, Any]:
        data = b""
        while True:
            if self._is_over():
                os.kill(pid, signal.SIGKILL)
                self._wait_for(pid)
                raise self._out_of_time()
            if not select.select([reader], [], [], POLL_SECONDS)[0]:
                continue
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                break
            data += chunk
        return _read_answer(data, self._wait_for(pid))

    def _wait_for(self, pid: int) -> int:
        """The status of an attempt that has ended. Effect: counts its processor time."""
        _, status, usage = os.wait4(pid, 0)
        self._spent += usage.ru_utime + usage.ru_stime
        return status

    def _out_of_time(self) -> ExhaustedError:
        self._is_cut = True
        return ExhaustedError(f"it could not be compiled in {self._fields['seconds']:.0f} s")


def _read_answer(data: bytes, status: int) -> tuple[str, Any]:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in CRASHES:
            raise ExhaustedError(f"the process that compiled it was ended by signal {number}")
        return "failed", f"oneDNN Graph crashes ({signal.Signals(number).name})"
    try:
        answer, detail = json.loads(data)
    except ValueError:  # An OpenMP runtime, for one, ends a process in which it cannot start threads.
        raise ExhaustedError("the process that compiled it ended without an answer") from None
    if answer == "failed" and NO_RESOURCES.search(detail):
        raise ExhaustedError(f"it could not be compiled now: {detail}")
    return answer, detail


def _run_and_exit(work: Callable[[], Any], writer: int, helper: int) -> None:
    """Effect: writes the outcome of the work to the pipe and ends this process, at the latest when the helper ends."""
    die_with_parent(signal.SIGKILL, parent=helper)
    try:
        try:
            answer = ["ok", work()]
        except Exception as error:  # noqa: BLE001  Any error of torch or oneDNN is an answer.
            answer = ["failed", " ".join((str(error) or type(error).__name__).split())[-200:]]
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def available_bytes() -> int:
    """Memory that can be allocated without swapping, on this machine and in this process's cgroups, in bytes."""
    root = Root()
    return free_memory(root, read_cgroups(root))


def _groups(signatures: Sequence[str]) -> Sequence[frozenset[int]]:
    """The positions of operations with the same signature."""
    alike: dict[str, set[int]] = {}
    for position, signature in enumerate(signatures):
        alike.setdefault(signature, set()).add(position)
    return [frozenset(group) for group in alike.values()]


def _all_that_meet(group: frozenset[int], others: Sequence[frozenset[int]]) -> frozenset[int]:
    """The group and those of the others that have a position in common with it."""
    return group.union(*(other for other in others if other & group))


# Inside the forked process


def compile_and_run(
    source: PortableGraph, inputs: list[Any], left_out: frozenset[int], rounding: Rounding = ROUNDING
) -> float:
    """Seconds of this thread's processor time for it. Other programs do not count, on whose idle CPUs this runs.

    Effect: compiles the graph as the worker does, and runs it. Raises: any error of torch and oneDNN,
    DifferentResultError, SlowerError.
    """
    torch._C._jit_set_autocast_mode(False)
    with torch.no_grad():
        given = [value for value in (*inputs, *source.constants) if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in given]
        unfused = function_of(graph_of(source))
        expected = _results(unfused, inputs)
        torch._C._jit_set_llga_enabled(True)
        start = time.thread_time()
        graph = graph_of(source)
        leave_out(graph, left_out)
        compiled = fusible_function_of(graph)
        for _ in range(WARM_UP_CALLS):
            compiled(*inputs)
        compiled_at = time.thread_time()
        results = _results(compiled, inputs)
        now = time.thread_time()
        spent, last = now - start, now - compiled_at
        if [tensor._version for tensor in given] != versions:
            raise DifferentResultError("it changes what it is given")
        _check_results(results, expected, lambda: _moved_results(source, inputs, rounding.moved), rounding.tolerance)
        fastest = _fastest(compiled, inputs, [last])
        if fastest > UNCERTAIN_SECONDS and fusible(graph):
            torch._C._jit_set_llga_enabled(False)
            unfused(*inputs)  # torch optimizes it.
            least = _fastest(unfused, inputs)
            allowed = SLOWER * least + UNCERTAIN_SECONDS
            if fastest > allowed and (fastest > FAR_BEYOND * allowed or _fastest(compiled, inputs) > allowed):
                raise SlowerError(f"a call takes {fastest:.2g} s, unfused {least:.2g} s")
    return spent


def _fastest(function: Function, inputs: list[Any], known: Sequence[float] = ()) -> float:
    """The shortest of some calls, in seconds of this thread's processor time. `known`: those of earlier ones."""
    durations = list(known)
    while len(durations) < REPEATED_CALLS and sum(durations) < REPEATED_SECONDS:
        start = time.thread_time()
        function(*inputs)
        durations.append(time.thread_time() - start)
    return min(durations)


def _results(function: Function, inputs: list[Any]) -> list[Tensor]:
    """The results of a call, with the same random numbers each time."""
    torch.manual_seed(0)
    results = function(*inputs)
    return list(results) if isinstance(results, tuple | list) else [results]


def _check_results(
    results: list[Tensor],
    expected: list[Tensor],
    others: Callable[[], list[Tensor]],
    tolerance: float = ROUNDING.tolerance,
) -> None:
    """Raises: DifferentResultError. `others`: the results of the graph unfused with other values, see Rounding.

    What random weights make infinite or huge says nothing.
    """
    moved: list[Tensor] = []
    for index, (result, unfused) in enumerate(zip(results, expected, strict=True)):
        reason = _difference(result, unfused, tolerance)
        if reason is None:
            continue
        moved = moved or others()
        if result.dtype is not unfused.dtype or _difference(moved[index], unfused, tolerance) is None:
            raise DifferentResultError(f"it computes something else: {reason}")


def _difference(result: Tensor, unfused: Tensor, tolerance: float) -> str | None:
    """How two results differ, by more than rounding; None if they do not."""
    if result.dtype is not unfused.dtype or result.shape != unfused.shape:
        return f"{result.dtype}{list(result.shape)} for {unfused.dtype}{list(unfused.shape)}"
    if not unfused.is_floating_point() or not unfused.numel():
        return None
    expected = unfused.double()
    if not bool(expected.isfinite().all()):
        return None
    largest = float(expected.abs().max())
    error = float((result.double() - expected).abs().max())
    return None if error <= tolerance * largest else f"{error:.1e} of {largest:.1e}"


def _moved_results(source: PortableGraph, inputs: list[Any], by: float) -> list[Tensor]:
    def moved(value: Any) -> Any:
        return _moved_value(value, by)

    changed = replace(source, constants=tuple(map(moved, source.constants)))
    return _results(function_of(graph_of(changed)), [*map(moved, inputs)])


def _moved_value(value: Any, by: float) -> Any:
    """The value; elements of a tensor of fractions are a little nearer to zero, so that none overflows.

    Whole numbers stay: of masks and positions, next ones would be others.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.element_size() == 1:
        return value
    return value if torch.equal(value, value.round()) else value * (1 - by * torch.rand_like(value))
