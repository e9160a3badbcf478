"""Whether oneDNN Graph can compile a graph on this machine, which is tried in a helper process the first time."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cpulaunch import __version__
from cpulaunch.worker.fusion.exclusion import everything, has_foreign_operations
from cpulaunch.worker.fusion.helper_process import (
    PATIENCE_SECONDS,
    HelperEndedError,
    HelperProcess,
    HelperStarvedError,
)
from cpulaunch.worker.fusion.math_settings import math_settings
from cpulaunch.worker.fusion.outcomes import UnusableError, default_folder, note_request, read_outcomes, version
from cpulaunch.worker.fusion.portable import PortableGraph
from cpulaunch.worker.fusion.search import TrialOutcome
from cpulaunch.worker.fusion.values import UnsendableError, describe
from cpulaunch.worker.fusion.wire import Request, encode_request

MAX_STARTS = 3
"""Helper processes started by one worker: one that ends by itself is started again."""

FORMAT = 14
"""Changes with what an outcome depends on, so that older outcomes are not used."""

LIBRARY_VARIABLES = ("ONEDNN_", "DNNL_")
"""Beginnings of the names of variables that change what oneDNN compiles."""

STARTED = time.time()
"""About when this process started, in seconds since the epoch."""

WAIT = False
"""Whether `Trials` waits for the helper by default. Tests set it."""


COMPILED_SHARE = 1 / 6
"""The share of the budget that one call may take to compile its graph: a server's clients wait for it."""


class Trials:
    """What this process knows about graphs. Thread-safe.

    `seconds`: limit for one graph. `wait`: whether a question waits for its answer (None: the module's default).
    """

    def __init__(self, seconds: float, *, folder: str | None = None, wait: bool | None = None) -> None:
        self._seconds = seconds
        self._folder = default_folder() if folder is None else folder
        self._wait = wait
        self._lock = threading.Lock()
        self._outcomes: dict[str, TrialOutcome] = {}
        self._asked: set[str] = set()
        self._helper: HelperProcess | None = None
        self._starts = 0
        self._patience: float | None = None
        self._started_at = int(STARTED)
        self._version: tuple[int, int] | None = (0, 0)
        self._unavailable: str | None = None

    def outcome(
        self, graph: PortableGraph, inputs: Sequence[Tensor], left_out: frozenset[int] = frozenset()
    ) -> TrialOutcome | None:
        """What is known about the graph for inputs like these; None while it is being tried.

        `left_out`: positions of operations that must not be fused.

        Effect: has an unknown graph tried.
        """
        if has_foreign_operations(graph):
            return TrialOutcome(left_out=everything(graph), lasting=False)
        try:
            described = describe((*inputs, *graph.constants))
        except UnsendableError as error:
            return TrialOutcome(refusal=f"it contains {error}", lasting=False)
        key = fingerprint(graph, described, left_out)
        with self._lock:
            self._load()
            if key in self._outcomes:
                return self._affordable(self._outcomes[key])
            if self._unavailable is not None:
                return TrialOutcome(refusal=self._unavailable, lasting=False)
            request = Request(
                key=key,
                graph=graph,
                left_out=left_out,
                threads=torch.get_num_threads(),
                math=math_settings(),
                seconds=self._seconds,
            )
            answer = self._ask(request, described)
            return None if answer is None else self._affordable(answer)

    def _affordable(self, outcome: TrialOutcome) -> TrialOutcome:
        """The outcome, or a refusal if the call in which the graph is compiled would wait too long."""
        reason = None if outcome.refusal is not None else self.refusal(outcome.seconds)
        return outcome if reason is None else TrialOutcome(refusal=reason, lasting=False)

    def refusal(self, seconds: float) -> str | None:
        """Why no call may wait so many seconds for its graph; None if it may."""
        limit = self._seconds * COMPILED_SHARE
        if seconds <= limit:
            return None
        return f"a call would wait {seconds:.0f} s for its compilation; --graph-budget gives it {limit:.3g} s"

    def _load(self) -> None:
        """Effect: learns what other processes have written since the last call."""
        found = version(self._folder)
        if found == self._version:
            return
        self._version = found
        try:
            known = read_outcomes(self._folder)
            self._outcomes |= {key: each for key, each in known.items() if each.holds_within(self._seconds)}
        except UnusableError as error:
            self._unavailable = f"it cannot be kept in mind which graphs crash: {error}"

    def _ask(self, request: Request, described: list[Any]) -> TrialOutcome | None:
        wait = WAIT if self._wait is None else self._wait
        while True:
            try:
                if self._patience is None:
                    self._patience = _patience_for(self._folder, request.key, self._started_at)
                helper = self._started(self._patience)
                if request.key not in self._asked:
                    helper.send(encode_request(request, described))
                    self._asked.add(request.key)
                self._outcomes.update(helper.receive(None if wait else 0.0))
            except HelperStarvedError:
                self._patience = 0.0
                self._end_helper()
            except HelperEndedError:
                self._drop()
            except OSError as error:
                self._unavailable = f"no process can be started to try it: {error}"
            if request.key in self._outcomes:
                return self._outcomes[request.key]
            if self._unavailable is not None:
                return TrialOutcome(refusal=self._unavailable, lasting=False)
            if not wait:
                return None

    def _started(self, patience: float) -> HelperProcess:
        """The running helper. Raises: HelperEndedError after too many starts, OSError."""
        if self._helper is not None and self._helper.owner != os.getpid():  # This process is a fork of its owner.
            self._drop()
        if self._helper is None:
            self._helper = HelperProcess(self._folder, patience=patience)
            self._starts += 1
            atexit.register(self._helper.close)
        return self._helper

    def _drop(self) -> None:
        """Effect: forgets the helper, which has ended by itself."""
        self._end_helper()
        if self._starts >= MAX_STARTS:
            self._unavailable = "the process that tries graphs ends by itself"

    def helper_pid(self) -> int | None:
        """The process id of the helper; None if it is not running."""
        return None if self._helper is None else self._helper.pid

    def close(self) -> None:
        """Effect: ends the helper."""
        with self._lock:
            self._end_helper()

    def _end_helper(self) -> None:
        """Effect: ends the helper and forgets what it was asked."""
        self._asked.clear()
        if self._helper is not None:
            self._helper.close()
            atexit.unregister(self._helper.close)
        self._helper = None

    def after_fork(self) -> None:
        """Effect: in a forked process, frees the lock, which a thread of the parent may have held, and the helper."""
        self._lock = threading.Lock()
        self._patience, self._started_at = None, int(time.time())
        self._end_helper()


def _patience_for(folder: str, key: str, started: int) -> float:
    """For how many seconds the helper waits for idle CPUs. Effect: notes that this process asks for a graph.

    `key`: of the first unknown graph that it asks for. `started`: when it did, in seconds since the epoch.
    """
    earlier = 0
    with suppress(UnusableError):  # The helper says so.
        earlier = note_request(folder, key, started=started)
    return PATIENCE_SECONDS[min(earlier, len(PATIENCE_SECONDS) - 1)]


def fingerprint(graph: PortableGraph, described: list[Any], left_out: frozenset[int] = frozenset()) -> str:
    """A key of the graph, its constants and inputs, and of everything else that oneDNN Graph's behaviour depends on.

    `left_out`: positions of operations that must not be fused.
    """
    variables = sorted(item for item in os.environ.items() if item[0].startswith(LIBRARY_VARIABLES))
    built = [torch.__version__, str(torch.version.git_version), torch.__config__.show()]
    machine = [FORMAT, __version__, built, _cpu(), variables]
    settings = [torch.get_num_threads(), math_settings()]
    inputs = [_without_elements(value) for value in described[: graph.inputs]]
    text = json.dumps([machine, settings, graph.text, inputs, described[graph.inputs :], sorted(left_out)])
    return hashlib.sha256(text.encode()).hexdigest()


def _without_elements(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    return {name: value for name, value in described.items() if name != "data"}


@cache  # The kernel takes milliseconds for it where there are many CPUs.
def _cpu() -> str:
    """The model and the instruction sets of this machine's CPUs. Source: proc(5), cpuinfo."""
    wanted = ("model name", "flags", "Features", "CPU part")
    with suppress(OSError), open("/proc/cpuinfo") as file:
        found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in file)}
        return ";".join(found.get(name, "") for name in wanted)
    return ""
