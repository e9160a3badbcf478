"""The agent's report on a job of several hosts, as the result of a launch."""

from __future__ import annotations

from cpulaunch.launch.hosts.agent.files import agent_report_file
from cpulaunch.launch.hosts.agent.messages import (
    MAX_KILLED,
    MAX_REPORT,
    AgentError,
    AgentReport,
    RankFailure,
    read_message,
)
from cpulaunch.launch.hosts.output import JobOutput
from cpulaunch.launch.monitor.watch import Observation
from cpulaunch.launch.monitor.worker_report import read_event_file
from cpulaunch.launch.output.streams import TAIL_BYTES, TAIL_LINES
from cpulaunch.launch.process.descriptors import STDERR
from cpulaunch.launch.process.processes import PID_MAX_LIMIT
from cpulaunch.launch.process.run_directory import events_path, in_run_directory
from cpulaunch.launch.supervision.error_file import RankError, shortened
from cpulaunch.launch.supervision.failure_text import exit_text
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.records.errors import CpulaunchError, LaunchError, NotExecutableError, NotFoundError, UsageError
from cpulaunch.records.plan import LATEST_SECONDS, JobPlan
from cpulaunch.records.record import replace
from cpulaunch.system.files.reading import is_marked_lost, read_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_CODE = 255

ERRORS: dict[int, type[CpulaunchError]] = {
    error.exit_code: error for error in (UsageError, NotExecutableError, NotFoundError)
}


def read_report(directory: str) -> AgentReport | None:
    """The agent's report in the run's directory; None if it ended without a whole one.

    Where it found no space for one, or a rank has removed it with its folder, a report without failures: its exit code
    tells how the ranks ended.
    """
    name, folder = in_run_directory(agent_report_file(directory))
    if is_marked_lost(name, folder=folder):
        return AgentReport(exit_code=0)
    try:
        report = read_message(name, AgentReport, max_bytes=MAX_REPORT, folder=folder)
    except FileNotFoundError:  # The launcher has made the file, before the agent started.
        return AgentReport(exit_code=0)
    except (OSError, ValueError, TypeError, RecursionError):  # A rank may have replaced it by anything.
        return None
    return report if _is_sound(report) else None


def _is_sound(report: AgentReport) -> bool:
    """Whether the values are of the types that an agent writes, and numbers such as there are."""
    error, failures = report.error, report.failures
    return (
        _is_number(report.exit_code, MAX_CODE)
        and _is_number(report.restarts, LATEST_SECONDS)
        and (error is None or (isinstance(error, AgentError) and isinstance(error.what, str)))
        and (error is None or _are_texts(error.value, error.source, error.hint))
        and isinstance(failures, tuple)
        and all(isinstance(each, RankFailure) and _is_sound_failure(each) for each in failures)
        and isinstance(report.killed, tuple)
        and len(report.killed) <= MAX_KILLED
        and all(_is_number(pid, PID_MAX_LIMIT) for pid in report.killed)
    )


def _is_sound_failure(failure: RankFailure) -> bool:
    return (
        _is_number(failure.rank, LATEST_SECONDS)
        and _is_number(failure.local_rank, LATEST_SECONDS)
        and _is_number(failure.pid, LATEST_SECONDS)
        and _is_number(abs(failure.exit_code) if isinstance(failure.exit_code, int) else None, MAX_CODE)
        and _is_number(failure.timestamp, LATEST_SECONDS)
        and _are_texts(failure.traceback, failure.log)
    )


def _is_number(value: object, largest: int) -> bool:
    return isinstance(value, int) and 0 <= value <= largest


def _are_texts(*values: object) -> bool:
    """Whether each of these is a text or None: an empty list is no text either."""
    return all(value is None or isinstance(value, str) for value in values)


def observed_ranks(directory: str, ranks: Sequence[int]) -> tuple[WorkerResult, ...]:
    """The ranks of a job that succeeded, with what each wrote about itself in the run's directory."""
    reports = {rank: read_event_file(events_path(directory, rank), workers=len(ranks)) for rank in ranks}
    seen = {rank: Observation(wall_seconds=0.0, report=report) for rank, report in reports.items()}
    return tuple(WorkerResult(index=rank, pid=0, exit_code=0, signal=None, observation=seen[rank]) for rank in ranks)


def job_result(
    job: JobPlan,
    agent: LaunchResult,
    *,
    report: AgentReport | None,
    output: JobOutput,
    succeeded: tuple[WorkerResult, ...] = (),
) -> LaunchResult:
    """How the ranks ended, from the result of the agent and its report; `succeeded`: the ranks if none failed.

    Raises: LaunchError or UsageError, reported by the agent or about its end.
    """
    if agent.exit_code == 0:  # What else the report says is not the agent's: a rank may have replaced or removed it.
        report = AgentReport(exit_code=0, restarts=0 if report is None else report.restarts)
    if report is None or agent.output_error is not None:
        return _result_without_report(agent)
    if report.error is not None and any(each.signal is not None for each in agent.workers):
        return _result_without_report(agent)
    kind = ERRORS.get(report.exit_code, LaunchError)
    if report.error is not None and agent.ended_by is None and kind.exit_code == agent.exit_code:
        error = report.error
        raise kind(error.what, value=error.value, source=error.source, hint=error.hint)
    if report.failures and any(each.status == report.exit_code for each in agent.workers):
        # A signal may have come while the agent ended the others.
        agent = replace(agent, exit_code=report.exit_code, ended_by=None)
    known = [failure for failure in report.failures if failure.local_rank < len(output.ranks)]
    workers = tuple(_failed_rank(failure, job, output) for failure in known)
    return replace(
        agent,
        workers=succeeded if not workers and agent.exit_code == 0 else workers,
        first_failure=workers[0].index if workers and agent.ended_by is None else None,
        attempts=(report.restarts + 1, job.max_restarts + 1),
    )


def _result_without_report(agent: LaunchResult) -> LaunchResult:
    """The result of a launch that was ended before the agent could report. Raises: LaunchError if it was not."""
    if agent.ended_by is not None or agent.output_error is not None:
        return replace(agent, workers=(), first_failure=None)
    raise LaunchError(
        "torch's elastic agent ended without a report",
        value=exit_text(agent.workers[0]),
        source=agent.host,
        hint="see its output above; LOGLEVEL=INFO makes it log more",
    )


def _failed_rank(failure: RankFailure, job: JobPlan, output: JobOutput) -> WorkerResult:
    code, traceback = failure.exit_code, failure.traceback
    stderr = output.ranks[failure.local_rank][-1]
    teed = not failure.log or bool(job.streams.tee[failure.local_rank] & STDERR)
    last_lines = _tail(failure.log) if failure.log else stderr.last_lines()
    return WorkerResult(
        index=failure.local_rank,
        pid=failure.pid,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        last_lines=last_lines,
        log=failure.log,
        shown=teed and bool(stderr.routes),
        ended_at=failure.timestamp,
        rank=failure.rank,
        error=None if traceback is None else RankError(text=shortened(traceback), timestamp=failure.timestamp),
    )


def _tail(path: str) -> tuple[str, ...]:
    """The last lines of a log; none if it cannot be read."""
    try:
        return tuple(read_end(path, max_bytes=TAIL_BYTES).decode(errors="replace").splitlines()[-TAIL_LINES:])
    except (OSError, ValueError):  # A path that a rank made up may hold what no path can.
        return ()
