"""The plan: exactly what will run. It is printed, written as JSON or a script, and executed."""

from __future__ import annotations

from cpulaunch.record import record
from cpulaunch.request import Origin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

Mode: TypeAlias = 'Literal["single", "instances", "ranks"]'
MemoryPolicy: TypeAlias = 'Literal["preferred", "bind", "interleave", "none"]'
Binder: TypeAlias = 'Literal["native", "numactl", "taskset", "none"]'
PreloadKind: TypeAlias = 'Literal["allocator", "openmp", "mkl-dispatch"]'


@record
class WorkerPlan:
    """One process to start. `cpus` empty: not bound. `env`: changes to the inherited environment, None unsets.

    `loader_cpus` are for its DataLoader workers alone and not among `cpus`; empty: they run where the worker does.
    `argv` is complete: with the numactl or taskset binder it begins with that program and its options, and
    the launcher then binds nothing itself.
    """

    index: int
    cpus: frozenset[int]
    numa_nodes: frozenset[int]
    mempolicy: MemoryPolicy
    threads: int
    env: tuple[tuple[str, str | None], ...]
    argv: tuple[str, ...]
    loader_cpus: frozenset[int] = frozenset()
    rank: int | None = None
    local_rank: int | None = None
    gpu: int | None = None


@record
class Note:
    """One value in the plan, who chose it and why, in one line."""

    setting: str
    value: str | None
    origin: Origin
    reason: str


@record
class PreloadCandidate:
    """A library the planner would preload, if a trial start of the worker's interpreter with it succeeds."""

    kind: PreloadKind
    name: str
    path: str
    required: bool
    """Asked for by name: a failed trial is an error, not a fallback."""


@record
class LaunchOptions:
    """How the workers are supervised. `show` None: all workers reach the terminal.

    `plugin`: settings were chosen that only the plugin inside torch can carry out.
    """

    binder: Binder = "native"
    grace_seconds: float = 30.0
    log_dir: str | None = None
    show: frozenset[int] | None = None
    buffered: bool = False
    strict: bool = False
    report: str | None = None
    metric: str | None = None
    start_barrier: bool = False
    plugin: bool = False

    @property
    def watched(self) -> bool:
        """Whether the workers tell the launch about themselves, through a directory of this run.

        Under --strict that is how a worker is noticed that never loaded the plugin it was to have.
        """
        asked = self.report is not None or self.metric is not None or self.start_barrier
        return asked or (self.strict and self.plugin)

    @property
    def supervised(self) -> bool:
        """Whether even a single worker needs a supervisor beside it."""
        return self.log_dir is not None or self.show is not None or self.watched


@record
class LaunchPlan:
    """Every worker, every value with origin and reason, every warning."""

    mode: Mode
    profile: str | None
    world_size: int
    workers: tuple[WorkerPlan, ...]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]
    launch: LaunchOptions

    @property
    def replaces_launcher(self) -> bool:
        """Whether the one worker takes over this process (exec): same pid, nothing resident."""
        return self.world_size == 1 and not self.launch.supervised
