"""The hosts agree before torch's agent starts, as it would wait for its whole timeout and then not say why.

They meet in the very store that torch's rendezvous uses: torch shares one server between the stores of a process.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import timedelta

from cpulaunch.launch.hosts.agent.reachability import is_here, refusal, unreachable, wait_until_reachable
from cpulaunch.records.endpoint import split_endpoint
from cpulaunch.records.errors import CpulaunchError, LaunchError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PORTS = {"static": 29500, "c10d": 29400, "etcd": 2379, "etcd-v2": 2379}
"""Where nothing is said. Source: torch elastic, one constant in each backend's module."""

JOIN_SECONDS = {"static": 900.0, "c10d": 600.0, "etcd": 600.0, "etcd-v2": 600.0}
"""Source: torch elastic, LaunchConfig's timeout for static, RendezvousTimeout's join for the others."""

READ_SECONDS = 60.0
"""Source: torch elastic, read_timeout of the c10d rendezvous."""

LOOK_SECONDS = 0.1
FAREWELL_SECONDS = 2.0
PRESENT, ARRIVED = "cpulaunch/present", "cpulaunch/arrived"
"""How many hosts came, and how many of them agree with the first."""
REFUSED, TOLD = "cpulaunch/refused", "cpulaunch/told"
"""Why the job is not to be, and how many hosts know."""


class Meeting:
    """Where and how long the hosts of one job wait for each other; `conf` is what torch's rendezvous gets."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.backend: str = job["backend"]
        self.run_id: str = job["run_id"]
        self.host_rank: int = job["host_rank"]
        self.hosts: tuple[int, int] = tuple(job["hosts"])
        self.conf: dict[str, Any] = dict(job["conf"])
        self.host, self.port = split_endpoint(job["endpoint"], default_port=PORTS.get(self.backend, 0))

    @property
    def skipped(self) -> bool:
        """Whether nobody else is to come, or the hosts meet in a way of its own."""
        return self.hosts[1] == 1 or self.backend not in PORTS or self.conf.get("store_type") == "file"

    @property
    def join_seconds(self) -> float:
        """How long a host waits for the others."""
        return self._seconds("join_timeout", self._seconds("timeout", JOIN_SECONDS.get(self.backend, 600.0)))

    @property
    def reach_seconds(self) -> float:
        """How long a host waits for the endpoint to answer."""
        return min(self.join_seconds, self._seconds("read_timeout", self.join_seconds))

    def _seconds(self, name: str, default: float) -> float:
        try:
            return float(self.conf.get(name, default))
        except ValueError:
            return default  # torch names it when it gets it.

    @property
    def nnodes(self) -> str:
        """As --nnodes writes it."""
        least, most = self.hosts
        return str(most) if least == most else f"{least}:{most}"

    @property
    def endpoint(self) -> str:
        """As an error names it."""
        return f"{self.host}:{self.port}"


def wait_for_endpoint(meeting: Meeting, notify: Callable[[str], None]) -> None:
    """Effect: returns once the endpoint answers, at once where it is this host. Raises: LaunchError or UsageError."""
    if meeting.backend.startswith("etcd"):
        check_etcd_client(meeting.backend)
    if meeting.skipped or _listens_itself(meeting):
        return
    wait_until_reachable(meeting.host, meeting.port, patience_seconds=meeting.reach_seconds, notify=notify)


def check_etcd_client(backend: str) -> None:
    """Effect: none. Raises: UsageError if torch's rendezvous over etcd would have no client for it."""
    from importlib.util import find_spec

    if find_spec("etcd") is None:
        raise UsageError(
            "the client of this rendezvous is not installed",
            value=backend,
            source=f"--rdzv-backend; {sys.executable} has no module etcd",
            hint="pip install python-etcd, or --rdzv-backend c10d, which needs nothing",
        )


def _listens_itself(meeting: Meeting) -> bool:
    """Whether this host's agent is to be the server."""
    if meeting.backend == "static":
        return meeting.host_rank == 0
    if meeting.backend != "c10d":
        return False
    asked = str(meeting.conf.get("is_host", "")).lower()
    return asked in ("1", "true", "t", "yes", "y") if asked else is_here(meeting.host)


def meet(meeting: Meeting) -> Any:
    """The store, to be kept until the job ends; None where there is none to meet in.

    Effect: all hosts of a static job have arrived; `meeting.conf` says what torch is to do.
    Raises: LaunchError if the store cannot be had, or the hosts contradict each other.
    """
    conf = meeting.conf
    if meeting.backend == "static":
        conf["rank"] = meeting.host_rank
        conf.setdefault("timeout", max(1, int(meeting.join_seconds)))
    if meeting.skipped or meeting.backend not in ("static", "c10d"):
        return None
    store, serving = _open_store(meeting)
    if meeting.backend == "static":
        _agree(store, meeting)
    else:
        conf["is_host"] = serving
        _compare(store, f"cpulaunch/{meeting.run_id}/nnodes", "--nnodes", meeting.nnodes)
    return store


def _open_store(meeting: Meeting) -> tuple[Any, bool]:
    """The store, and whether this process serves it. Raises: LaunchError."""
    seconds = meeting.join_seconds if meeting.backend == "static" else meeting._seconds("read_timeout", READ_SECONDS)
    timeout = timedelta(seconds=seconds)
    if _listens_itself(meeting):
        try:
            return _tcp_store(meeting, timeout, serving=True), True
        except (RuntimeError, ValueError) as error:
            # Another agent of this host may serve it already, where nobody said which one does.
            if meeting.backend == "static" or "is_host" in meeting.conf:
                raise _port_taken(meeting, error) from None
    try:
        return _tcp_store(meeting, min(timeout, timedelta(seconds=READ_SECONDS)), serving=False), False
    except (RuntimeError, ValueError) as error:
        if reason := refusal(meeting.host, meeting.port, timeout_seconds=1.0):
            raise unreachable(meeting.host, meeting.port, reason=f"{reason}; it answered before") from None
        raise LaunchError(
            "what answers at the rendezvous endpoint is no rendezvous",
            value=meeting.endpoint,
            source=_first_line(error),
            hint="another program listens there: choose another port, the same on every host",
        ) from None


def _tcp_store(meeting: Meeting, timeout: timedelta, *, serving: bool) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(
        meeting.host,
        meeting.port,
        is_master=serving,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _port_taken(meeting: Meeting, error: Exception) -> LaunchError:
    from cpulaunch.launch.ranks.port import port_holder

    holder = port_holder(meeting.port)
    return LaunchError(
        "the rendezvous port cannot be listened on",
        value=meeting.port,
        source=f"taken by {holder}" if holder else _first_line(error),
        hint="choose another port, the same on every host: --master-port or --rdzv-endpoint HOST:PORT",
    )


def _compare(store: Any, key: str, option: str, mine: str) -> None:
    """Effect: none if the host that came first has the same value of an option. Raises: LaunchError."""
    first = store.compare_set(key, "", mine).decode()
    if first != mine:
        raise LaunchError(
            f"the hosts disagree on {option}",
            value=f"{mine} here, {first} on the host that came first",
            source="command line",
            hint=f"start every host with the same {option}",
        )


def _agree(store: Any, meeting: Meeting) -> None:
    """Effect: every host of a static job is there, each with its own number. Raises: LaunchError on all of them."""
    try:
        store.add(PRESENT, 1)
        _compare(store, "cpulaunch/nnodes", "--nnodes", meeting.nnodes)
        _compare(store, "cpulaunch/run_id", "--rdzv-id", meeting.run_id)
        _claim_number(store, meeting)
        store.add(ARRIVED, 1)
        _wait_for_all(store, meeting)
    except CpulaunchError as error:
        if not isinstance(error, _RefusedError):
            store.set(REFUSED, str(error.what) + (f": {error.value}" if error.value else ""))
        _take_leave(store, meeting)
        raise


class _RefusedError(LaunchError):
    """Another host has ended the job before it began."""


def _claim_number(store: Any, meeting: Meeting) -> None:
    if store.add(f"cpulaunch/host/{meeting.host_rank}", 1) > 1:
        raise LaunchError(
            "two hosts have the same number",
            value=f"--node-rank {meeting.host_rank}",
            source=meeting.endpoint,
            hint=f"give every host its own --node-rank, 0 to {meeting.hosts[1] - 1}",
        )


def _wait_for_all(store: Any, meeting: Meeting) -> None:
    """Effect: as many hosts as the job has are there. Raises: LaunchError."""
    deadline = time.monotonic() + meeting.join_seconds
    while (arrived := store.add(ARRIVED, 0)) < meeting.hosts[1]:
        if store.check([REFUSED]):
            break
        if time.monotonic() >= deadline:
            raise too_few_hosts(meeting, arrived=arrived)
        time.sleep(LOOK_SECONDS)  # A store cannot be waited on for one of several keys.
    if store.check([REFUSED]):
        raise _RefusedError(
            "another host refused the job",
            value=store.get(REFUSED).decode(errors="replace"),
            source=meeting.endpoint,
            hint="start every host with the same options, and its own --node-rank",
        )


def _take_leave(store: Any, meeting: Meeting) -> None:
    """Effect: the host that serves the store stays until the others know, but not for long."""
    deadline = time.monotonic() + FAREWELL_SECONDS
    with suppress(RuntimeError):  # The store is gone; why it was left is what counts.
        present = store.add(PRESENT, 0)
        told = store.add(TOLD, 1)
        while meeting.host_rank == 0 and told < present and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            told = store.add(TOLD, 0)


def too_few_hosts(meeting: Meeting, *, arrived: int | None = None) -> LaunchError:
    """The error for a job that never became complete."""
    count = "" if arrived is None else f", {arrived} came"
    return LaunchError(
        "not all hosts came",
        value=f"--nnodes {meeting.nnodes}{count}",
        source=f"{meeting.endpoint}, in {meeting.join_seconds:g} s (--rdzv-conf join_timeout=N)",
        hint="start cpulaunch on every host, with the same --nnodes, endpoint and --rdzv-id",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
