"""How the ranks of this host ended, as torch's agent tells it; imported only where torch is."""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SIGTERM = 15
SPARE = "is_failed"
"""What torch stumbles over, up to 2.13, when a host was one more than the job could use and the job has ended."""


class NotedLogs(DefaultLogsSpecs):  # type: ignore[misc]
    """torch's own layout of logs, which remembers the last attempt: its number, each local rank's file of stderr."""

    stderrs: dict[int, str]
    restarts: int

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """As torch's. Effect: the attempt is noted; a stream that goes to the terminal has no file."""
        self.restarts = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        made = super().reify(envs)
        self.stderrs = {rank: path for rank, path in made.stderrs.items() if path and path != os.devnull}
        return made


def job_report(run: Callable[[], None], *, logs_specs: Any) -> dict[str, Any]:
    """The report on a job that came to have ranks, whose output went where `logs_specs` says.

    Raises: what torch raises besides.
    """
    try:
        run()
    except ChildFailedError as error:
        return _failed(error, logs_specs)
    except SignalException as error:
        return {"exit_code": 128 + int(error.sigval), "signal": int(error.sigval)}
    except AttributeError as error:
        if SPARE not in str(error):
            raise
        return {"exit_code": 0, "spare": True}
    return {"exit_code": 0}


def _failed(error: ChildFailedError, logs_specs: Any) -> dict[str, Any]:
    """The report on failed ranks, the first in time first.

    torch counts time in whole seconds, and a rank it ended itself fails by SIGTERM in the same second.
    """
    ordered = sorted(
        error.failures.items(), key=lambda item: (item[1].timestamp, item[1].exitcode == -SIGTERM, item[0])
    )
    logs = getattr(logs_specs, "stderrs", {})
    failures = [_failure(rank, failure, log=logs.get(failure.local_rank)) for rank, failure in ordered]
    code = failures[0]["exitcode"]
    restarts = getattr(logs_specs, "restarts", 0)
    return {"exit_code": code if code >= 0 else 128 - code, "failures": failures, "restarts": restarts}


def _failure(rank: int, failure: ProcessFailure, *, log: str | None) -> dict[str, Any]:
    known = failure.error_file_data.get("message") is not None and os.path.isfile(failure.error_file)
    return {
        "rank": rank,
        "local_rank": failure.local_rank,
        "pid": failure.pid,
        "exitcode": failure.exitcode,
        "timestamp": failure.timestamp,
        "traceback": _traceback(failure.message) if known else None,
        "log": log,
    }


def _traceback(message: Any) -> str:
    """What @record wrote of the exception. Source: torch elastic, ErrorHandler.record_exception."""
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        return str(extra.get("py_callstack", message.get("message", "")))
    return str(message)
