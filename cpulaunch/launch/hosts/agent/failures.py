"""How torch's agent says that the ranks of this host ended, as a report; imported only where torch is."""

from __future__ import annotations

import os
import time

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from cpulaunch.launch.hosts.agent.messages import AgentReport, RankFailure
from cpulaunch.launch.supervision.error_file import RankError, error_in, read_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

SPARE_HOST_ATTRIBUTE = "is_failed"
"""In the AttributeError of torch up to 2.13 on a host that the job did not need, once the job has ended."""


class RecordedFailure(ProcessFailure):  # type: ignore[misc]
    """torch's record of a failed rank, without its exception if the error file holds none.

    A rank may write anything there, be killed while it writes, or keep a lease on it: then torch's own has its agent
    fail, or waits. It may also write another rank's: a time outside of the attempt does not count.
    """

    error_file: str
    timestamp: int
    attempt_start = 0
    """When the ranks were started last (Unix time, whole seconds)."""
    ranks: Mapping[int, int] = {}
    """By local rank: the rank."""
    of_attempt: tuple[RecordedFailure, ...] = ()
    """The ranks that have failed since then."""
    recorded: str | None = None
    """The traceback that @record wrote, or the message alone."""

    def __post_init__(self) -> None:
        path, self.error_file = self.error_file, ""
        super().__post_init__()
        RecordedFailure.of_attempt += (self,)
        content = read_json(path)
        error = error_in(content)
        if error is None:
            return
        self.error_file, self.error_file_data = path, _texts_of(content, error)
        self.message = self.recorded = error.text
        if error.timestamp is not None and self.attempt_start <= error.timestamp <= self.timestamp:
            self.timestamp = error.timestamp


def _texts_of(content: dict[str, Any], error: RankError) -> dict[str, Any]:
    """What a rank recorded, for torch's events: its texts alone, as nesting may be so deep that it can only be read."""
    message = content["message"]
    if not isinstance(message, dict):
        return {"message": error.text}
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    return {"message": _texts(message) | {"extraInfo": _texts(extra)}}


def _texts(values: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in values.items() if isinstance(value, str)}


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
        self.restarts = _begin_attempt(envs)
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
        logs_specs.restarts = _begin_attempt(envs)
        return reify(envs)

    logs_specs.reify = counted
    return logs_specs


def _begin_attempt(envs: dict[int, dict[str, str]]) -> int:
    """The number of the attempt. Effect: failures and exceptions recorded before now are not those of its ranks."""
    RecordedFailure.attempt_start, RecordedFailure.of_attempt = int(time.time()), ()
    RecordedFailure.ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
    return int(envs[0]["TORCHELASTIC_RESTART_COUNT"])


def job_report(run: Callable[[], None], *, logs_specs: Any) -> AgentReport:
    """The report on a job that `run` carries out, with its output where `logs_specs` says.

    Raises: what torch raises, except for failed ranks and signals.
    """
    try:
        run()
    except ChildFailedError as error:
        return _failure_report(error.failures, logs_specs)
    except SignalException as error:
        failures = {RecordedFailure.ranks[each.local_rank]: each for each in RecordedFailure.of_attempt}
        if failures:  # The signal came while the other ranks were ended, and it forbids a restart.
            return _failure_report(failures, logs_specs)
        return AgentReport(exit_code=128 + int(error.sigval))
    except AttributeError as error:
        if SPARE_HOST_ATTRIBUTE not in str(error):
            raise
        # The ranks share the state of the rendezvous: one that has failed can put its own host among the spare ones.
        failed = RecordedFailure.of_attempt
        return AgentReport(exit_code=_status(failed[0].exitcode) if failed else 0)
    return AgentReport(exit_code=0)


def _status(code: int) -> int:
    """The exit status for an exit code, or for minus a signal."""
    return code if code >= 0 else 128 - code


def _failure_report(failed: Mapping[int, RecordedFailure], logs_specs: Any) -> AgentReport:
    """The report on failed ranks, the first to fail first.

    torch's timestamps are whole seconds; it adds the ranks that it ended itself behind those that had failed by then.
    """
    ordered = sorted(failed.items(), key=lambda item: item[1].timestamp)
    logs = getattr(logs_specs, "stderrs", {})
    failures = tuple(
        _rank_failure(rank, failure, log=logs.get(failure.local_rank), shown=failure is ordered[0][1])
        for rank, failure in ordered
    )
    return AgentReport(
        exit_code=_status(failures[0].exit_code), failures=failures, restarts=getattr(logs_specs, "restarts", 0)
    )


def _rank_failure(rank: int, failure: RecordedFailure, *, log: str | None, shown: bool) -> RankFailure:
    """How a rank failed, with its traceback if that is shown."""
    return RankFailure(
        rank=rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        timestamp=failure.timestamp,
        traceback=failure.recorded if shown and failure.recorded else None,
        log=log,
    )
