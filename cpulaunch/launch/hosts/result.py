"""What the agent of a job of several hosts reported, as the result of a launch."""

from __future__ import annotations

import json

from cpulaunch.launch.hosts.agent.files import report_file
from cpulaunch.launch.hosts.output import JobOutput
from cpulaunch.launch.monitor.watch import Observation
from cpulaunch.launch.monitor.worker_report import read_worker_report
from cpulaunch.launch.output.streams import TAIL_BYTES, TAIL_LINES
from cpulaunch.launch.process.run_directory import events_path
from cpulaunch.launch.supervision.error_file import RankError
from cpulaunch.launch.supervision.failure_text import signal_words
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.records.errors import CpulaunchError, LaunchError, NotExecutableError, NotFoundError, UsageError
from cpulaunch.records.plan import JobPlan
from cpulaunch.records.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

ERRORS: dict[int, type[CpulaunchError]] = {
    error.exit_code: error for error in (UsageError, NotExecutableError, NotFoundError)
}


def read_report(directory: str) -> dict[str, Any] | None:
    """The agent's report; None if it ended without one."""
    try:
        with open(report_file(directory)) as file:
            report: dict[str, Any] = json.load(file)
    except (FileNotFoundError, ValueError):
        return None
    return report


def observed_ranks(directory: str, ranks: Iterable[int]) -> tuple[WorkerResult, ...]:
    """The ranks of a job that succeeded, with what each told of itself in this run's directory."""
    return tuple(
        WorkerResult(
            index=rank, pid=0, exit_code=0, signal=None, observation=_observation(events_path(directory, rank))
        )
        for rank in ranks
    )


def _observation(path: str) -> Observation:
    with open(path, encoding="utf-8", errors="replace") as file:
        return Observation(wall_seconds=0.0, report=read_worker_report(file))


def job_result(
    job: JobPlan,
    agent: LaunchResult,
    *,
    report: Mapping[str, Any] | None,
    output: JobOutput,
    succeeded: tuple[WorkerResult, ...] = (),
) -> LaunchResult:
    """How the ranks ended, from how the agent did; `succeeded`: what is known of them if none failed.

    Raises: LaunchError or UsageError, the agent's or about it.
    """
    if report is None or agent.output_error is not None:
        return _without_report(agent)
    if "error" in report and agent.ended_by is None:
        what, value, source, hint = report["error"]
        raise ERRORS.get(report["exit_code"], LaunchError)(what, value=value, source=source, hint=hint)
    workers = tuple(_worker(failure, output) for failure in report.get("failures", ()))
    return replace(
        agent,
        exit_code=agent.exit_code,
        workers=succeeded if not workers and agent.exit_code == 0 else workers,
        first_failure=workers[0].index if workers and agent.ended_by is None else None,
        attempts=(report.get("restarts", 0) + 1, job.max_restarts + 1),
    )


def _without_report(agent: LaunchResult) -> LaunchResult:
    """The result of a launch that was ended before the agent could report. Raises: LaunchError if it was not."""
    if agent.ended_by is not None or agent.output_error is not None:
        return replace(agent, workers=(), first_failure=None)
    ended = agent.workers[0]
    how = f"exit code {ended.exit_code}" if ended.signal is None else f"killed by {signal_words(ended.signal)}"
    raise LaunchError(
        "torch's elastic agent ended without a report",
        value=how,
        source=agent.host,
        hint="its output above says more, and LOGLEVEL=INFO makes it say more",
    )


def _worker(failure: Mapping[str, Any], output: JobOutput) -> WorkerResult:
    code, local_rank = failure["exitcode"], failure["local_rank"]
    log, error = failure["log"], failure["traceback"]
    return WorkerResult(
        index=local_rank,
        pid=failure["pid"],
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        last_lines=_tail(log) if log else output.ranks[local_rank][-1].last_lines(),
        log=log,
        ended_at=failure["timestamp"],
        rank=failure["rank"],
        error=None if error is None else RankError(text=error, timestamp=failure["timestamp"]),
    )


def _tail(path: str) -> tuple[str, ...]:
    """The last lines of a log; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
    except OSError:
        return ()
