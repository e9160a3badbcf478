"""How torch's agent says that the ranks of this host ended, as a report; imported only where torch is."""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from cpulaunch.launch.hosts.agent.messages import MAX_ERROR_FILE, MAX_TRACEBACK, AgentReport, RankFailure
from cpulaunch.records.plan import LATEST_SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SIGTERM = 15
SPARE_HOST_ATTRIBUTE = "is_failed"
"""In the AttributeError of torch up to 2.13 on a host that the job did not need, once the job has ended."""
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What torch raises for an error file that its @record has not written, or not to its end."""


class RecordedFailure(ProcessFailure):  # type: ignore[misc]
    """torch's record of a failed rank; without its exception if the error file is malformed, as if there were none.

    A rank may write anything there, or be killed while it writes: then torch's own has its agent fail.
    """

    def __post_init__(self) -> None:
        try:
            self._check_size()
            super().__post_init__()
            self._check()
        except UNREADABLE:
            self.error_file = ""
            super().__post_init__()

    def _check_size(self) -> None:
        """Raises: ValueError for a larger file than an exception needs: torch would read all of it."""
        if os.path.isfile(self.error_file) and os.path.getsize(self.error_file) > MAX_ERROR_FILE:
            raise ValueError(self.error_file)

    def _check(self) -> None:
        """Raises: ValueError, TypeError, OverflowError or OSError for what torch or the launcher cannot write."""
        if not 0 <= self.timestamp <= LATEST_SECONDS:
            raise ValueError(self.timestamp)
        self.timestamp_isoformat()
        if not isinstance(_recorded_text(self.message), str):
            raise TypeError(self.message)


def read_any_error_file() -> None:
    """Effect: torch's agent reports how a rank failed whatever is in its error file.

    Source: torch 2.13, torch/distributed/elastic/multiprocessing/api.py, MultiprocessContext and SubprocessContext.
    """
    api.ProcessFailure = RecordedFailure


class RecordingLogsSpecs(DefaultLogsSpecs):  # type: ignore[misc]
    """torch's own layout of logs; remembers of the last attempt its number and each local rank's file of stderr.

    `own_folder`: where the folder of the logs is, if it is for this run alone.
    """

    stderrs: dict[int, str]
    restarts: int

    def __init__(self, *, own_folder: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._own_folder = own_folder

    def _make_log_dir(self, log_dir: str | None, rdzv_run_id: str) -> str:
        if log_dir is not None and self._own_folder is not None:
            return log_dir
        return str(super()._make_log_dir(log_dir, rdzv_run_id))

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The attempt's files, as torch places them. Effect: remembers them; output to the terminal has no file."""
        self.restarts = _restarts(envs)
        made = super().reify(envs)
        self.stderrs = {rank: self._shown(path) for rank, path in made.stderrs.items() if path and path != os.devnull}
        return made

    def _shown(self, path: str) -> str:
        """The path of a log as others than the agent know it."""
        if self._own_folder is None:
            return path
        return os.path.join(self._own_folder, os.path.relpath(path, self.root_log_dir))


def count_attempts(logs_specs: Any) -> Any:
    """A specification of logs of another package. Effect: it remembers the number of the last attempt."""
    reify = logs_specs.reify

    def counted(envs: dict[int, dict[str, str]]) -> LogsDest:
        logs_specs.restarts = _restarts(envs)
        return reify(envs)

    logs_specs.reify = counted
    return logs_specs


def _restarts(envs: dict[int, dict[str, str]]) -> int:
    return int(envs[0]["TORCHELASTIC_RESTART_COUNT"])


def job_report(run: Callable[[], None], *, logs_specs: Any) -> AgentReport:
    """The report on a job that `run` carries out, with its output where `logs_specs` says.

    Raises: what torch raises, except for failed ranks and signals.
    """
    try:
        run()
    except ChildFailedError as error:
        return _failure_report(error, logs_specs)
    except SignalException as error:
        return AgentReport(exit_code=128 + int(error.sigval))
    except AttributeError as error:
        if SPARE_HOST_ATTRIBUTE not in str(error):
            raise
    return AgentReport(exit_code=0)


def _failure_report(error: ChildFailedError, logs_specs: Any) -> AgentReport:
    """The report on failed ranks, the first to fail first.

    torch's timestamps are whole seconds, and a rank that torch ended itself fails by SIGTERM in the same second.
    """
    ordered = sorted(
        error.failures.items(), key=lambda item: (item[1].timestamp, item[1].exitcode == -SIGTERM, item[0])
    )
    logs = getattr(logs_specs, "stderrs", {})
    failures = tuple(_rank_failure(rank, failure, log=logs.get(failure.local_rank)) for rank, failure in ordered)
    code = failures[0].exit_code
    return AgentReport(
        exit_code=code if code >= 0 else 128 - code, failures=failures, restarts=getattr(logs_specs, "restarts", 0)
    )


def _rank_failure(rank: int, failure: ProcessFailure, *, log: str | None) -> RankFailure:
    recorded = failure.error_file_data.get("message") is not None and os.path.isfile(failure.error_file)
    return RankFailure(
        rank=rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        timestamp=failure.timestamp,
        traceback=str(_recorded_text(failure.message))[:MAX_TRACEBACK] if recorded else None,
        log=log,
    )


def _recorded_text(message: Any) -> Any:
    """The traceback that @record wrote, or the message alone. Source: torch elastic, ErrorHandler.record_exception."""
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        return extra.get("py_callstack", message.get("message", ""))
    return message
