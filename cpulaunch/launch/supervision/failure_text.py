"""The lines that tell a person how a launch failed: who failed first, how, and what the others did."""

from __future__ import annotations

import signal
import time

from cpulaunch.system.signals import SIGKILL, SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult

TRACEBACK = "Traceback (most recent call last):"
"""How Python begins one. Source: traceback.format_exc."""

KILLED = 128 + 9
"""What SIGKILL leaves, of the worker itself or of what a shell wrapped around it ran."""


def summary(result: LaunchResult) -> tuple[str, ...]:
    """Lines for a person: nothing after success, else who failed, how, and what it said last."""
    lines: list[str] = []
    if result.output_error is not None:
        return tuple(f"cpulaunch: error: {result.output_error}".splitlines())
    if result.first_failure is not None and result.attempts is not None:
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
    lines = [f"cpulaunch: worker {worker.index} on {result.host} failed{others}: {exit_text(worker)}"]
    lines += out_of_memory(worker, result)
    if worker.log is not None:
        lines.append(f"cpulaunch: its log: {worker.log}")
    if worker.last_lines:
        lines.append("cpulaunch: its last lines:")
        lines += [f"  {line}" for line in worker.last_lines]
    return lines


def root_cause(result: LaunchResult) -> WorkerResult:
    """The rank of a failed job that failed first.

    A rank that recorded its exception may take long to end, while another fails because of it: the recorded second
    goes before the end. Of one second, the first to end counts. Source: torch elastic, ChildFailedError.
    """
    return min((rank for rank in result.workers if rank.status), key=_failed_at)


def _failed_at(rank: WorkerResult) -> tuple[int, float]:
    ended_at = rank.ended_at or 0.0
    recorded = None if rank.error is None else rank.error.timestamp
    return int(ended_at) if recorded is None else recorded, ended_at


def failed_ranks(result: LaunchResult) -> list[str]:
    """Lines for a person about a job of which a rank failed."""
    rank = next(each for each in result.workers if each.index == result.first_failure)
    which = f"rank {rank.rank} (local rank {rank.index}, pid {rank.pid}) on {result.host}"
    first = " first" if len(result.workers) > 1 else ""
    lines = [f"cpulaunch: {which} failed{first}: {exit_text(rank)}", *out_of_memory(rank, result)]
    lines += [f"cpulaunch: {line}" for line in (*_others(result, rank), _when(result, rank))]
    if rank.log is not None:
        lines.append(f"cpulaunch: its log: {rank.log}")
    return [*lines, *_words(rank)]


def _others(result: LaunchResult, first: WorkerResult) -> list[str]:
    others = [rank for rank in result.workers if rank is not first]
    if not others:
        return []
    if all(rank.status == 0 and (rank.ended_at or 0.0) < (first.ended_at or 0.0) for rank in others):
        return ["the other ranks had finished before"]
    failed = [rank for rank in others if rank.status and rank.signal not in (SIGTERM, SIGKILL)]
    if not failed:
        return ["the other ranks were ended"]
    return [f"{len(failed)} of the other {len(others)} failed after it; the rest were ended"]


def _when(result: LaunchResult, rank: WorkerResult) -> str:
    at, _ = _failed_at(rank)
    made, possible = result.attempts or (1, 1)
    attempt = f", in attempt {made} of {possible}" if possible > 1 else ""
    return f"at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}{attempt}"


def _words(rank: WorkerResult) -> list[str]:
    """Its traceback, if it recorded one, and its last lines, without the traceback that Python prints there again."""
    lines = rank.last_lines
    told = []
    if rank.error is not None:
        told = ["cpulaunch: its error:", *(f"  {line}" for line in rank.error.text.splitlines())]
        if TRACEBACK in lines:
            lines = lines[: lines.index(TRACEBACK)]
    if lines:
        told += ["cpulaunch: its last lines:", *(f"  {line}" for line in lines)]
    return told


def exit_text(worker: WorkerResult) -> str:
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
