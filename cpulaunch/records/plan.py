"""The plan: the object that is printed, written as JSON or as a script, and executed."""

from __future__ import annotations

from cpulaunch.records.record import record
from cpulaunch.records.request import Origin, SchedulerRank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    from cpulaunch.records.host import LibraryKind
    from cpulaunch.records.settings import Binder, MemoryPolicy

Mode: TypeAlias = 'Literal["single", "instances", "ranks"]'

LARGEST_METRIC = 1e300
"""Larger numbers are no measurements. Sums of all smaller ones are finite, and so are their forms as floats."""
LATEST_SECONDS = 253_402_300_799
"""Unix time at the end of the year 9999; some systems cannot write a later time as a date."""


@record
class WorkerPlan:
    """One process to start. `cpus`: empty if not bound. `env`: changes to the inherited environment, None unsets.

    `loader_cpus` are for its DataLoader workers only and not in `cpus`; if empty, these run on `cpus`.
    `ccl_cpus` are for oneCCL's threads only; if empty, it has no threads.
    `argv` is complete: with the binder numactl or taskset it starts with that program and its options, and the
    launcher binds nothing itself.
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
        """All CPUs of this worker."""
        return self.cpus | self.loader_cpus | self.ccl_cpus


@record
class Note:
    """One value in the plan, with its origin and a reason of one line."""

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
    """A library to preload if the worker's interpreter starts with it."""

    kind: LibraryKind
    name: str
    path: str
    required: bool
    """Requested by name: a failed trial is an error instead of a fallback."""


@record
class LaunchOptions:
    """How the workers are supervised. `show` None: the output of all workers is shown. `stdin`: the index of the worker
    that reads standard input, "all" or "none"; None: a single worker does. `quiet`: notes are left out, but not errors,
    warnings and metrics.

    `plugin`: some chosen settings need the plugin inside torch.
    """

    binder: Binder = "native"
    grace_seconds: float = 30.0
    log_dir: str | None = None
    show: frozenset[int] | None = None
    stdin: str | None = None
    buffered: bool = False
    strict: bool = False
    quiet: bool = False
    report: str | None = None
    html: str | None = None
    metric: str | None = None
    start_barrier: bool = False
    plugin: bool = False

    @property
    def watched(self) -> bool:
        """Whether the workers report to the launch, through a directory of this run.

        Under --strict the reports reveal a worker that did not load a required plugin.
        """
        reports = self.reported or self.metric is not None or self.start_barrier
        return reports or (self.strict and self.plugin)

    @property
    def reported(self) -> bool:
        """Whether the launch ends with a report, as data or as a page."""
        return self.report is not None or self.html is not None

    @property
    def reports_on_stdout(self) -> bool:
        """Whether stdout is for the report alone, and what workers write there goes to stderr."""
        return self.report == "-"

    @property
    def shows_output(self) -> bool:
        """Whether the output of any worker is shown."""
        return self.show is None or bool(self.show)

    @property
    def supervised(self) -> bool:
        """Whether even a single worker needs a supervisor beside it."""
        routed = self.log_dir is not None or self.show is not None or self.stdin is not None
        return routed or self.watched


@record
class StreamsPlan:
    """Where the ranks' output goes, by local rank: 1 stdout, 2 stderr, 3 both, 0 neither. Source: torchrun -r, -t.

    `filters`: texts for stdout and for stderr; lines that contain one are copied to one file. `prefix` is the template
    of --log-line-prefix-template; None: torchrun's "[ROLE LOCAL_RANK]:". `prefixes` are the prefixes of the ranks, but
    for the host's name, if their numbers are known.
    """

    redirects: tuple[int, ...]
    tee: tuple[int, ...]
    filters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    prefix: str | None = None
    prefixes: tuple[str, ...] = ()


@record
class Rendezvous:
    """How the hosts of a job find each other; the fields are torch elastic's.

    `endpoint` is "HOST:PORT", the path of a file (c10d with store_type=file), or "". `id` None: a random id at each
    start. `conf` are further options.
    """

    backend: str
    endpoint: str
    id: str | None
    conf: tuple[tuple[str, str], ...] = ()


@record
class JobPlan:
    """The part of a distributed job that concerns this host.

    `engine` native: one host, with cpulaunch's own supervisor; elastic: torch's agent, which starts each rank through
    a shim that binds it; scheduler: a scheduler started one process per rank, and the plan has this rank only.
    `hosts` are the smallest and the largest number of hosts. `master_port` None: a free port at each start.
    `interpreter` is the Python with torch that runs the agent.
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
    """Every worker, every value with its origin and reason, and every warning.

    `unmeasured`: --dist-backend auto needs a measurement of collectives before the backend can be chosen.
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
        """Whether the only worker replaces this process (exec), with the same process id."""
        alone = self.world_size == 1 if self.job is None else self.job.engine == "scheduler"
        return alone and not self.launch.supervised
