"""The lines on stderr after a failed launch: which worker failed first, how, and how the others ended."""

from __future__ import annotations

import errno
import os
import time

from cpulaunch.records.errors import escaped
from cpulaunch.system.signals import SIGKILL, SIGTERM, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult

TRACEBACK = "Traceback (most recent call last):"
"""The first line of Python's tracebacks. Source: traceback.format_exc."""

TRACEBACK_ENTRY = '  File "'

ESCAPE, COLOR_CODES, COLOR_END = "\x1b[", "0123456789;", "m"
"""The parts of a colour. Source: ECMA-48, SGR. This module does without `re`, as every launch imports it."""

IN_USE = ("address already in use", "eaddrinuse", os.strerror(errno.EADDRINUSE).lower())
"""Words of the error of a server at whose address another one listens: of Python, and of torch's store."""

KILLED = 128 + SIGKILL
"""The status of a worker that SIGKILL ended, and of a shell around a program that SIGKILL ended."""


def summary(result: LaunchResult) -> tuple[str, ...]:
    """The lines about a launch that failed or was stopped; none after success."""
    return tuple(map(_shown, _summary(result)))


def _summary(result: LaunchResult) -> tuple[str, ...]:
    if result.output_error is not None:
        return tuple(f"cpulaunch: error: {result.output_error}".splitlines())
    if result.first_failure is not None:
        worker = next(each for each in result.workers if each.index == result.first_failure)
        if result.attempts is None:
            return tuple(_failed_worker(worker, result))
        return tuple(_failed_rank(worker, result, attempts=result.attempts))
    if result.ended_by is not None and result.exit_code:
        return (f"cpulaunch: stopped by {signal_text(result.ended_by)}",)
    if result.attempts is not None and result.exit_code:  # The agent could not write which rank failed.
        return (f"cpulaunch: the job failed: exit code {result.exit_code}",)
    return ()


def _shown(line: str) -> str:
    """The line without colours, and with other control characters escaped: they are a worker's, or another host's."""
    return line if line.isprintable() else escaped(_without_colors(line).expandtabs())


def _without_colors(line: str) -> str:
    first, *others = line.split(ESCAPE)
    return first + "".join(map(_without_color, others))


def _without_color(part: str) -> str:
    """What follows an ESCAPE, without the rest of the colour; with the ESCAPE where that begins no colour."""
    text = part.lstrip(COLOR_CODES)
    return text.removeprefix(COLOR_END) if text.startswith(COLOR_END) else ESCAPE + part


def _failed_worker(worker: WorkerResult, result: LaunchResult) -> list[str]:
    subject = f"worker {worker.index} on {result.host}"
    others = [each for each in result.workers if each is not worker]
    first = f"{subject} failed ({exit_text(worker)}); {_others_text(others, worker)}"
    if not others:
        first = f"{subject} failed: {exit_text(worker)}"
    return [f"cpulaunch: {first}", *_out_of_memory(worker, result), *_log(worker), *_last_lines(_unseen(worker))]


def _has_shown_traceback(worker: WorkerResult) -> bool:
    """Whether the terminal has just shown a traceback of the worker's."""
    return worker.shown and any(line == TRACEBACK or line.startswith(TRACEBACK_ENTRY) for line in worker.last_lines)


def _unseen(worker: WorkerResult) -> tuple[str, ...]:
    """The worker's last lines; none if they are a traceback that the terminal has just shown."""
    return () if _has_shown_traceback(worker) else worker.last_lines


def _failed_rank(rank: WorkerResult, result: LaunchResult, *, attempts: tuple[int, int]) -> list[str]:
    subject = f"rank {rank.rank} (local rank {rank.index}, pid {rank.pid}) on {result.host}"
    others = [each for each in result.workers if each is not rank]
    first = f"{subject} failed ({exit_text(rank)}); {_others_text(others, rank)}"
    if not others:
        first = f"{subject} failed: {exit_text(rank)}"
    lines = [f"cpulaunch: {first}", *_out_of_memory(rank, result)]
    lines += [f"cpulaunch: {_time_text(rank, result.started_at, attempts)}", *_log(rank)]
    if rank.error is None or _has_shown_traceback(rank):
        return [*lines, *_last_lines(_unseen(rank))]
    lines += ["cpulaunch: its exception:", *(f"  {line}" for line in rank.error.text.splitlines())]
    last = rank.last_lines
    # Python has printed the recorded traceback there too.
    return [*lines, *_last_lines(last[: last.index(TRACEBACK)] if TRACEBACK in last else last)]


def _others_text(others: list[WorkerResult], first: WorkerResult) -> str:
    """What became of the other workers; of one that ended after the first failure, a signal shows that it was ended."""
    ranks, were = ("the other", "was") if len(others) == 1 else ("the others", "were")
    if all(rank.status == 0 and (rank.ended_at or 0.0) < (first.ended_at or 0.0) for rank in others):
        return f"{ranks} had already finished"
    failed = sum(1 for rank in others if rank.status and rank.signal not in (SIGTERM, SIGKILL))
    if not failed:
        return f"{ranks} {were} then ended"
    if failed == len(others):
        return f"{ranks} failed afterwards"
    return f"{failed} {'other' if failed == 1 else 'others'} failed afterwards, the rest were then ended"


def _time_text(rank: WorkerResult, started_at: float, attempts: tuple[int, int]) -> str:
    seconds, _ = _failed_at(rank, started_at)
    made, possible = attempts
    attempt = f" (attempt {made} of {possible})" if possible > 1 else ""
    return f"at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))}{attempt}"


def _log(worker: WorkerResult) -> list[str]:
    return [] if worker.log is None else [f"cpulaunch: log: {worker.log}"]


def _last_lines(lines: tuple[str, ...]) -> list[str]:
    return ["cpulaunch: last lines of its output:", *(f"  {line}" for line in lines)] if lines else []


def root_cause(result: LaunchResult) -> WorkerResult:
    """The rank of a failed job that failed first.

    A rank that recorded its exception may take long to end, while another fails because of it: so the recorded time
    counts, not that of its end. Among ranks of the same second, the first to end counts.
    Source: torch elastic, ChildFailedError.
    """
    return min((rank for rank in result.workers if rank.status), key=lambda rank: _failed_at(rank, result.started_at))


def _failed_at(rank: WorkerResult, started_at: float) -> tuple[int, float]:
    """The second of a rank's failure, and the time of its end; Unix times.

    A recorded time counts if the rank ran then: another rank may have written the file.
    """
    ended_at = rank.ended_at or 0.0
    recorded = None if rank.error is None else rank.error.timestamp
    if recorded is None or not int(started_at) <= recorded <= (rank.ended_at or recorded):
        recorded = int(ended_at)
    return recorded, ended_at


def found_port_in_use(result: LaunchResult, port: int) -> bool:
    """Whether a rank says, in one of its last lines or its exception, that another process listens at this port.

    torch's store and cpulaunch's name it. The program's own ports are another matter.
    """
    recorded = (rank.error.text for rank in result.workers if rank.error is not None)
    texts = (*recorded, *(line for rank in result.workers for line in rank.last_lines))
    return any(words in text.lower() and str(port) in _words(text) for text in texts for words in IN_USE)


def _words(text: str) -> list[str]:
    """The words of the text, of letters, digits and underscores."""
    return "".join(each if each.isalnum() or each == "_" else " " for each in text).split()


def exit_text(worker: WorkerResult) -> str:
    """How a worker ended: "exit code 3", or "killed by SIGSEGV (signal 11: segmentation fault)"."""
    return f"killed by {signal_text(worker.signal)}" if worker.signal is not None else f"exit code {worker.exit_code}"


def _out_of_memory(worker: WorkerResult, result: LaunchResult) -> list[str]:
    if worker.status != KILLED or not result.oom_kills:
        return []
    processes = "1 process" if result.oom_kills == 1 else f"{result.oom_kills} processes"
    return [f"cpulaunch: out of memory: the kernel killed {processes} at this cgroup's memory limit"]


def signal_text(number: int) -> str:
    """A signal's name, number and meaning: "SIGSEGV (signal 11: segmentation fault)"."""
    names = (name for name in sorted(vars(signal)) if name.startswith("SIG") and not name.startswith("SIG_"))
    name = next((name for name in names if getattr(signal, name) == number), f"signal {number}")
    meaning = (signal.strsignal(number) or "unknown").split(":")[0]
    return f"{name} (signal {number}: {meaning[:1].lower() + meaning[1:]})"
