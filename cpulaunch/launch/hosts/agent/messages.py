"""What the launcher, torch's agent and the ranks' shims exchange: records, as JSON files in the run's directory."""

from __future__ import annotations

import json
import os

from cpulaunch.records.plan import JobPlan, Rendezvous, StreamsPlan
from cpulaunch.records.record import fields, record
from cpulaunch.system.files.folders import open_private, remove_folder, remove_path
from cpulaunch.system.files.reading import read_start
from cpulaunch.system.files.writing import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    Message = TypeVar("Message")


@record
class AgentConfig:
    """What torch's agent runs on this host. The job's rendezvous always has an id here.

    `log_dir`: where torch makes a folder for this run's logs. `shown`: the local ranks whose output reaches the
    terminal; None: all. `shim`: the command that becomes a rank, to which the agent adds a local rank and its own pid.
    """

    job: JobPlan
    log_dir: str
    shown: tuple[int, ...] | None
    grace_seconds: float
    shim: tuple[str, ...]


@record
class RankPipe:
    """The named pipe at `path` that replaces a rank's stdout (descriptor 1) or stderr (2).

    `agent_path` is the agent's own pipe, which the rank inherits unless torch sends its output to a file.
    """

    descriptor: int
    path: str
    agent_path: str


@record
class RankConfig:
    """What a rank's shim executes, and how it changes the environment it inherits; a value of None unsets.

    `cpus` empty: not bound. `policy`: the mode of the memory policy and its NUMA nodes.
    """

    path: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str | None], ...] = ()
    cpus: tuple[int, ...] = ()
    policy: tuple[int, tuple[int, ...]] | None = None
    pipes: tuple[RankPipe, ...] = ()


@record
class AgentError:
    """The parts of a CpulaunchError that the agent raised."""

    what: str
    value: str | None
    source: str | None
    hint: str | None


@record
class RankFailure:
    """How a rank of this host failed. `exit_code`: minus the signal that killed it; `timestamp`: Unix time, seconds."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    timestamp: int
    traceback: str | None = None
    log: str | None = None


@record
class AgentReport:
    """How the job ended on this host: an error of the agent, or the failed ranks, the first to fail first."""

    exit_code: int
    error: AgentError | None = None
    failures: tuple[RankFailure, ...] = ()
    restarts: int = 0
    killed: tuple[int, ...] = ()
    """The pids of ranks that a signal has ended: what they have left behind may still use their shared memory."""


MAX_KILLED = 1 << 16
"""Killed ranks of which a report tells, as of one job's attempts there may be any number."""

MAX_BYTES = 1 << 26
"""Read of a message; most of one is the arguments and the environment of a rank."""

MAX_REPORT = 1 << 22
"""Bytes read of a report, which a rank may replace: as objects, JSON takes twenty times as much memory.

The traceback is less than a fifth of it, the rest is enough for the failures of ten thousand ranks.
"""

RECORDS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *(AgentConfig, JobPlan, StreamsPlan, Rendezvous),
        *(RankConfig, RankPipe),
        *(AgentReport, AgentError, RankFailure),
    )
}
"""What a message may consist of, by the name written beside each record's fields."""


def write_message(path: str, message: object, *, folder: int | None = None) -> None:
    """Effect: a new file, instead of what a rank has made, holds the record and those in it. Raises: OSError.

    `folder`: the opened one in which `path` is a name; None: it is a path.
    """
    data = json.dumps(message, default=_to_json).encode()
    try:
        replace(path, data, folder=folder)
    except IsADirectoryError:
        if folder is None:
            remove_path(path)
        else:
            remove_folder(path, folder=folder)
        replace(path, data, folder=folder)


def read_message(path: str, kind: type[Message], *, max_bytes: int = MAX_BYTES, folder: int | None = None) -> Message:
    """The record that a file holds, of which so many bytes are read; in a folder that only this user can change.

    `folder`: as of `write_message`.
    Raises: OSError; ValueError if this is no JSON; TypeError if it is another record, or a field is unknown or missing.
    """
    parent, name = os.path.split(path)
    own = open_private(parent) if folder is None else folder  # Another user may have made or moved another one there.
    try:
        content = read_start(name, max_bytes=max_bytes, folder=own)
    finally:
        if folder is None:
            os.close(own)
    message = json.loads(content, object_hook=_from_json)
    if not isinstance(message, kind):
        raise TypeError(f"{path} holds no {kind.__name__}")
    return message


def _to_json(message: object) -> dict[str, Any]:
    cls = type(message)
    return {"record": cls.__name__, **{name: getattr(message, name) for name in fields(cls)}}


def _from_json(values: dict[str, Any]) -> Any:
    cls = RECORDS.get(values.pop("record", ""))
    if cls is None:
        raise TypeError(f"no record of a message has the fields {', '.join(values)}")
    return cls(**{name: _with_tuples(value) for name, value in values.items()})


def _with_tuples(value: Any) -> Any:
    return tuple(_with_tuples(each) for each in value) if isinstance(value, list) else value
