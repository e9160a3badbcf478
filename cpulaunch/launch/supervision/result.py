"""How a launch ended, as data."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.launch.monitor.watch import Observation
    from cpulaunch.launch.output.metrics import Metric
    from cpulaunch.launch.supervision.error_file import RankError
    from cpulaunch.records.errors import CpulaunchError


@record
class WorkerResult:
    """How one worker ended: its exit code, or the signal that killed it, and the last lines of its output.

    `metric`: the value of --metric in its output. `observation`: None unless the run is watched.
    """

    index: int
    pid: int
    exit_code: int | None
    signal: int | None
    last_lines: tuple[str, ...] = ()
    log: str | None = None
    shown: bool = False
    """Whether the terminal has its output."""
    ended_at: float | None = None
    """Unix time in seconds."""
    metric: Metric | None = None
    observation: Observation | None = None
    rank: int | None = None
    error: RankError | None = None
    """The exception that a rank of a job recorded."""

    @property
    def status(self) -> int:
        """The exit code that a shell would show: 128+N for signal N."""
        return 128 + self.signal if self.signal is not None else self.exit_code or 0


@record
class LaunchResult:
    """How a launch ended. `first_failure`: the first worker to fail; `ended_by`: the signal that ended the launch.

    `end_requested`: whether the launch received a signal that ends programs. `output_error`: the workers' output was
    lost, and all workers were terminated. `oom_kills`: processes that the kernel killed in this cgroup for memory
    during the launch; None if unknown.
    """

    exit_code: int
    host: str
    workers: tuple[WorkerResult, ...]
    first_failure: int | None = None
    ended_by: int | None = None
    end_requested: bool = False
    paused: bool = False
    """Whether Ctrl-Z had stopped the launch, and nothing had continued it yet."""
    inside_line: bool = False
    """Whether the workers' output ends in the middle of a line on stderr."""
    output_error: CpulaunchError | None = None
    oom_kills: int | None = None
    wall_seconds: float | None = None
    started_at: float = 0.0
    """Unix time in seconds; of a job, that of the last attempt."""
    attempts: tuple[int, int] | None = None
    """Of a job: how often its ranks were started, and how often they could have been."""


def oom_kills(memory_events: str) -> int | None:
    """How often the kernel killed a process of a cgroup for memory, from the text of its events file.

    Source: cgroup v2 memory.events and v1 memory.oom_control, both with a line "oom_kill N".
    """
    for line in memory_events.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdigit():
            return int(count)
    return None
