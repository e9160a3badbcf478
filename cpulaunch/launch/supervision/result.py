"""What became of a launch, and how it is told."""

from __future__ import annotations

import signal

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.launch.monitor.watch import Seen
    from cpulaunch.launch.output.metrics import Figure
    from cpulaunch.launch.supervision.error_file import RankError
    from cpulaunch.records.errors import CpulaunchError

KILLED = 128 + 9
"""What SIGKILL leaves, of the worker itself or of what a shell wrapped around it ran."""


@record
class WorkerResult:
    """How one worker ended: an exit code, or the signal that killed it, and its last lines of output.

    `figure` is what --metric found there; `seen` is for runs that are watched.
    """

    index: int
    pid: int
    exit_code: int | None
    signal: int | None
    last_lines: tuple[str, ...] = ()
    log: str | None = None
    ended_at: float | None = None
    """Seconds since the epoch."""
    figure: Figure | None = None
    seen: Seen | None = None
    rank: int | None = None
    error: RankError | None = None
    """What a rank of a job wrote about its failure."""

    @property
    def status(self) -> int:
        """The exit code a shell would show: 128+N for signal N."""
        return 128 + self.signal if self.signal is not None else self.exit_code or 0


@record
class LaunchResult:
    """How the launch ended. `first_failure` is the worker, in time, that decided; `ended_by` the signal that did.

    `asked_to_end`: somebody signalled it to; `trouble`: output that was asked for was lost, so all were ended.
    `oom_kills` counts processes the kernel killed in this cgroup meanwhile; None where it does not say.
    """

    exit_code: int
    host: str
    workers: tuple[WorkerResult, ...]
    first_failure: int | None = None
    ended_by: int | None = None
    asked_to_end: bool = False
    trouble: CpulaunchError | None = None
    oom_kills: int | None = None
    wall_seconds: float | None = None
    attempts: tuple[int, int] | None = None
    """Of a job: how many times its ranks were started, and how many times they might have been."""


def summary(result: LaunchResult) -> tuple[str, ...]:
    """Lines for a person: nothing after success, else who failed, how, and what it said last."""
    lines: list[str] = []
    if result.trouble is not None:
        return tuple(str(result.trouble).splitlines())
    if result.first_failure is not None and result.attempts is not None:
        from cpulaunch.launch.supervision.failure_text import failed_ranks

        lines += failed_ranks(result)
    elif result.first_failure is not None:
        worker = next(w for w in result.workers if w.index == result.first_failure)
        many = len(result.workers) > 1
        lines += _failure(worker, result, many=many)
    elif result.ended_by is not None:
        lines.append(f"cpulaunch: ended by {signal_words(result.ended_by)}")
    return tuple(lines)


def _failure(worker: WorkerResult, result: LaunchResult, *, many: bool) -> list[str]:
    others = " first; the others were ended" if many else ""
    lines = [f"cpulaunch: worker {worker.index} on {result.host} failed{others}: {how_ended(worker)}"]
    lines += out_of_memory(worker, result)
    if worker.log is not None:
        lines.append(f"cpulaunch: its log: {worker.log}")
    if worker.last_lines:
        lines.append("cpulaunch: its last lines:")
        lines += [f"  {line}" for line in worker.last_lines]
    return lines


def how_ended(worker: WorkerResult) -> str:
    """In words: an exit code, or a signal."""
    return f"killed by {signal_words(worker.signal)}" if worker.signal is not None else f"exit code {worker.exit_code}"


def out_of_memory(worker: WorkerResult, result: LaunchResult) -> list[str]:
    """A line that blames memory, where the kernel says that it was."""
    if worker.status != KILLED or not result.oom_kills:
        return []
    count = result.oom_kills
    return [f"cpulaunch: out of memory: the kernel killed {count} process(es) at this cgroup's memory limit"]


def signal_words(number: int) -> str:
    """A signal's name, number and meaning: "SIGSEGV (signal 11: segmentation fault)"."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    words = (signal.strsignal(number) or "unknown").split(":")[0]
    return f"{name} (signal {number}: {words[:1].lower() + words[1:]})"


def oom_kills(memory_events: str) -> int | None:
    """How often the kernel killed a process of the cgroup for memory, from the text of its events file.

    Source: cgroup v2 memory.events and v1 memory.oom_control, both with a line "oom_kill N".
    """
    for line in memory_events.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdigit():
            return int(count)
    return None
