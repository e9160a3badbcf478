"""The plan: exactly what will run. It is printed, written as JSON or a script, and executed."""

from __future__ import annotations

from cpulaunch.records.record import record
from cpulaunch.records.request import Origin, SchedulerRank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from cpulaunch.records.host import LibraryKind
    from cpulaunch.records.settings import Binder, MemoryPolicy

Mode: TypeAlias = 'Literal["single", "instances", "ranks"]'


@record
class WorkerPlan:
    """One process to start. `cpus` empty: not bound. `env`: changes to the inherited environment, None unsets.

    `loader_cpus` are for its DataLoader workers alone and not among `cpus`; empty: they run where the worker does.
    `ccl_cpus` are for oneCCL's threads in the same way; empty: it has none.
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
    ccl_cpus: frozenset[int] = frozenset()

    @property
    def all_cpus(self) -> frozenset[int]:
        """The CPUs that are this worker's, whatever runs there."""
        return self.cpus | self.loader_cpus | self.ccl_cpus


@record
class Note:
    """One value in the plan, who chose it and why, in one line."""

    setting: str
    value: str | None
    origin: Origin
    reason: str


@record
class VariableRequest:
    """A value that a setting requests for an environment variable; None unsets it.

    `per_worker`: one value for each worker instead, in order. `shown`: what a note shows for an unreadable value.
    """

    name: str
    value: str | None
    origin: Origin
    reason: str
    per_worker: tuple[str, ...] = ()
    shown: str | None = None


@record
class PreloadCandidate:
    """A library the planner would preload, if a trial start of the worker's interpreter with it succeeds."""

    kind: LibraryKind
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
class StreamsPlan:
    """Where the ranks' output goes, by local rank: 1 stdout, 2 stderr, 3 both, 0 neither. Source: torchrun -r, -t.

    `filters`: words whose lines are also copied to one file, for stdout and for stderr. `prefix` is the template of
    TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, None for torchrun's "[ROLE LOCAL_RANK]:"; `prefixes` is what it comes to for
    each rank, where its number is known.
    """

    redirects: tuple[int, ...]
    tee: tuple[int, ...]
    filters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    prefix: str | None = None
    prefixes: tuple[str, ...] = ()


@record
class Rendezvous:
    """How the hosts of a job find each other, in torch elastic's words.

    `endpoint` is "HOST:PORT" or "". `id` None: a random one at each start. `conf` are further settings.
    """

    backend: str
    endpoint: str
    id: str | None
    conf: tuple[tuple[str, str], ...] = ()


@record
class JobPlan:
    """One distributed job as this host sees it.

    `engine` native: one host, cpulaunch's own supervisor; elastic: torch's agent, each rank started through a shim
    that binds it; scheduler: a scheduler started one process per rank, and the plan holds this one alone.
    `master_port` None: a free one at every start. `hosts` are the fewest and the most. `interpreter` is the Python
    that has torch, for the agent.
    """

    engine: Literal["native", "elastic", "scheduler"]
    hosts: tuple[int, int]
    host_rank: int
    local_world_size: int
    role: str
    rendezvous: Rendezvous
    master_addr: str
    master_port: int | None
    max_restarts: int
    streams: StreamsPlan
    local_addr: str | None = None
    monitor_interval_seconds: float = 0.1
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    run_path: bool = False
    virtual_local_rank: bool = False
    start_method: str = "spawn"
    event_log_handler: str = "null"
    logs_specs: str | None = None
    interpreter: str = ""
    scheduled_rank: SchedulerRank | None = None


@record
class LaunchPlan:
    """Every worker, every value with origin and reason, every warning.

    `unmeasured`: what its collectives run on is left open until somebody measures (--dist-backend auto).
    """

    mode: Mode
    profile: str | None
    world_size: int
    workers: tuple[WorkerPlan, ...]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]
    launch: LaunchOptions
    job: JobPlan | None = None
    unmeasured: bool = False

    @property
    def replaces_launcher(self) -> bool:
        """Whether the one worker takes over this process (exec): same pid, nothing resident."""
        alone = self.world_size == 1 if self.job is None else self.job.engine == "scheduler"
        return alone and not self.launch.supervised
