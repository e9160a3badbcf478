"""The hosts of a job compare their options before torch's agent starts, which would only wait and not say why.

They do so in the store that torch's rendezvous uses: torch shares one server between the stores of a process.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

from cpulaunch.launch.hosts.agent.reachability import (
    connect_error,
    is_this_host,
    unreachable_error,
    wait_until_reachable,
)
from cpulaunch.launch.hosts.agent.stores import of_no_stranger
from cpulaunch.records.endpoint import is_file_store, rendezvous_address, split_endpoint
from cpulaunch.records.errors import CpulaunchError, LaunchError, UsageError
from cpulaunch.records.plan import JobPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PORTS = {"static": 29500, "c10d": 29400, "etcd": 2379, "etcd-v2": 2379}
"""Default ports. Source: torch elastic, one constant in each backend's module."""

JOIN_SECONDS = {"static": 900.0, "c10d": 600.0, "etcd": 600.0, "etcd-v2": 600.0}
"""Source: torch elastic, LaunchConfig's timeout for static, RendezvousTimeout's join for the others."""

READ_SECONDS = 60.0
"""Source: torch elastic, read_timeout of the c10d rendezvous."""

ANSWER_SECONDS = 1.0
"""How much longer than torch's timeout, after which torch says itself why it could not connect."""

POLL_SECONDS = 0.1
EXIT_NOTICE_SECONDS = 2.0
CONNECTED, AGREED = "cpulaunch/present", "cpulaunch/arrived"
"""Keys of the store: how many hosts have connected, and how many of them agree with the first."""
REFUSED, NOTICED = "cpulaunch/refused", "cpulaunch/told"
"""Keys of the store: why the job was refused, and how many hosts have noticed."""


class HostRendezvous:
    """Where the hosts of one job meet, and how long each waits for the others."""

    def __init__(self, job: JobPlan) -> None:
        self.backend = job.rendezvous.backend
        self.run_id = job.rendezvous.id or ""
        self.host_rank = job.host_rank
        self.hosts = job.hosts
        self.conf = dict(job.rendezvous.conf)
        address = rendezvous_address(job.rendezvous.endpoint, backend=self.backend, conf=self.conf)
        self.host, self.port = split_endpoint(address, default_port=PORTS.get(self.backend, 0))

    @property
    def skips_comparison(self) -> bool:
        """Whether there is no other host, or the backend is one that has no store to compare options in."""
        return self.hosts[1] == 1 or self.backend not in PORTS or is_file_store(self.conf)

    @property
    def join_seconds(self) -> float:
        """How long a host waits for the others."""
        return self.seconds("join_timeout", self.seconds("timeout", JOIN_SECONDS.get(self.backend, 600.0)))

    @property
    def connect_seconds(self) -> float:
        """How long a host waits until the endpoint accepts connections."""
        return min(self.join_seconds, self.seconds("read_timeout", self.join_seconds))

    def seconds(self, name: str, default: float) -> float:
        """A duration that --rdzv-conf sets; the default where it does not, or sets no number."""
        try:
            return float(self.conf.get(name, default))
        except ValueError:
            return default  # torch reports it when it reads the setting itself.

    @property
    def nnodes(self) -> str:
        """The number of hosts in the form of --nnodes: "2" or "1:2"."""
        fewest, most = self.hosts
        return str(most) if fewest == most else f"{fewest}:{most}"

    @property
    def endpoint(self) -> str:
        """The endpoint as HOST:PORT."""
        return f"{self.host}:{self.port}"

    def serves_store(self) -> bool:
        """Whether this host's agent is to serve the store."""
        if self.backend == "static":
            return self.host_rank == 0
        if self.backend != "c10d":
            return False
        is_host = str(self.conf.get("is_host", "")).lower()
        return is_host in ("1", "true", "t", "yes", "y") if is_host else is_this_host(self.host)


def wait_for_endpoint(rendezvous: HostRendezvous, notify: Callable[[str], None]) -> None:
    """Effect: returns once the endpoint accepts connections, at once where this host serves it.

    Raises: LaunchError or UsageError.
    """
    if rendezvous.backend.startswith("etcd"):
        check_etcd_client(rendezvous.backend)
    if rendezvous.skips_comparison or rendezvous.serves_store():
        return
    wait_until_reachable(rendezvous.host, rendezvous.port, timeout_seconds=rendezvous.connect_seconds, notify=notify)


def check_etcd_client(backend: str) -> None:
    """Effect: none. Raises: UsageError if torch's rendezvous over etcd would find no etcd client."""
    from importlib.util import find_spec

    if find_spec("etcd") is None:
        raise UsageError(
            "the rendezvous backend needs the Python module etcd",
            value=backend,
            source=f"--rdzv-backend; {sys.executable} does not have it",
            hint="pip install python-etcd, or use --rdzv-backend c10d",
        )


def compare_hosts(rendezvous: HostRendezvous) -> tuple[Any, dict[str, Any]]:
    """The store (None if there is none), which the caller keeps until the job ends, and torch's rendezvous settings.

    Effect: all hosts of a static job have connected.
    Raises: LaunchError if the store cannot be reached, or the hosts' options contradict each other.
    """
    conf: dict[str, Any] = dict(rendezvous.conf)
    if rendezvous.backend == "static":
        conf["rank"] = rendezvous.host_rank
        conf.setdefault("timeout", max(1, int(rendezvous.join_seconds)))
    if rendezvous.skips_comparison or rendezvous.backend not in ("static", "c10d"):
        return None, conf
    store, serving = _open_store(rendezvous)
    if rendezvous.backend == "static":
        _compare_static_job(store, rendezvous)
    else:
        conf["is_host"] = serving
        _compare_option(store, f"cpulaunch/{rendezvous.run_id}/nnodes", "--nnodes", rendezvous.nnodes)
    return store, conf


def _open_store(rendezvous: HostRendezvous) -> tuple[Any, bool]:
    """The store, and whether this process serves it. Raises: LaunchError."""
    is_static = rendezvous.backend == "static"
    seconds = rendezvous.join_seconds if is_static else rendezvous.seconds("read_timeout", READ_SECONDS)
    taken: Exception | None = None
    if rendezvous.serves_store():
        try:
            return _tcp_store(rendezvous, seconds, serving=True), True
        except (RuntimeError, ValueError) as error:
            # Without is_host, another agent of this host may be the one that serves it.
            if is_static or "is_host" in rendezvous.conf:
                raise _port_error(rendezvous, error) from None
            taken = error
    try:
        return _connected_store(rendezvous, min(seconds, READ_SECONDS)), False
    except (RuntimeError, ValueError) as error:
        raise _store_error(rendezvous, error, taken) from None


def _store_error(rendezvous: HostRendezvous, error: Exception, taken: Exception | None) -> LaunchError:
    """The error for a store that cannot be reached; `taken`: why this host does not serve it, if it has tried."""
    if reason := connect_error(rendezvous.host, rendezvous.port, timeout_seconds=1.0):
        if "EADDRINUSE" in str(taken):  # Of a process that does not listen.
            return _port_error(rendezvous, taken or error)
        note = "it answered before" if taken is None else first_line(taken)
        return unreachable_error(rendezvous.host, rendezvous.port, reason=f"{reason}; {note}")
    return LaunchError(
        "the server at the rendezvous endpoint is not a rendezvous store",
        value=rendezvous.endpoint,
        source=first_line(error),
        hint="another program listens there: choose another port, the same on every host",
    )


def _connected_store(rendezvous: HostRendezvous, timeout_seconds: float) -> Any:
    """A client of the store. Raises: LaunchError if its server says nothing, and torch's errors.

    torch's timeout ends no wait for the first answer of a server that accepts the connection: torch 2.13.
    """
    found: list[Any] = []

    def connect() -> None:
        try:
            found.append(_tcp_store(rendezvous, timeout_seconds, serving=False))
        except (RuntimeError, ValueError, OSError, CpulaunchError) as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_seconds + ANSWER_SECONDS)
    if not found:
        if reason := connect_error(rendezvous.host, rendezvous.port, timeout_seconds=1.0):
            raise unreachable_error(rendezvous.host, rendezvous.port, reason=reason)
        raise LaunchError(
            "the server at the rendezvous endpoint does not answer",
            value=rendezvous.endpoint,
            source=f"it accepts connections, but did not answer in {timeout_seconds + ANSWER_SECONDS:g} s",
            hint="if another program listens there, choose another port, the same on every host",
        )
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _tcp_store(rendezvous: HostRendezvous, timeout_seconds: float, *, serving: bool) -> Any:
    from torch.distributed import TCPStore

    make_store = TCPStore if rendezvous.backend == "static" else of_no_stranger(TCPStore)
    return make_store(
        rendezvous.host,
        rendezvous.port,
        is_master=serving,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _port_error(rendezvous: HostRendezvous, error: Exception) -> LaunchError:
    from cpulaunch.launch.ranks.port import port_holder

    holder = port_holder(rendezvous.port)
    return LaunchError(
        "cannot listen on the rendezvous port",
        value=rendezvous.port,
        source=f"in use by {holder}" if holder else first_line(error),
        hint="choose another port, the same on every host: --master-port or --rdzv-endpoint HOST:PORT",
    )


def _compare_option(store: Any, key: str, option: str, value: str) -> None:
    """Effect: none. Raises: LaunchError if an option's value differs from that of the first host to connect."""
    first = store.compare_set(key, "", value).decode(errors="replace")
    if first != value:
        raise LaunchError(
            f"the hosts disagree on {option}",
            value=f"{value} on {socket.gethostname()}, {first} on the first host to connect",
            hint=f"start every host with the same {option}",
        )


def _compare_static_job(store: Any, rendezvous: HostRendezvous) -> None:
    """Effect: every host of a static job has connected, each with its own rank. Raises: LaunchError on all of them."""
    try:
        store.add(CONNECTED, 1)
        _compare_option(store, "cpulaunch/nnodes", "--nnodes", rendezvous.nnodes)
        _compare_option(store, "cpulaunch/run_id", "--rdzv-id", rendezvous.run_id)
        _claim_host_rank(store, rendezvous)
        store.add(AGREED, 1)
        _wait_for_all_hosts(store, rendezvous)
    except CpulaunchError as error:
        if not isinstance(error, _RefusedError):
            store.set(REFUSED, error.what if error.value is None else f"{error.what}: {error.value}")
        _wait_for_exit_notices(store, rendezvous)
        raise


class _RefusedError(LaunchError):
    """Another host has refused the job."""


def _claim_host_rank(store: Any, rendezvous: HostRendezvous) -> None:
    """Raises: LaunchError if another host has it, or this one had it before it was started again.

    torch's static rendezvous gives a rank once. Source: torch elastic, StaticTCPRendezvous.
    """
    key = f"cpulaunch/host/{rendezvous.host_rank}"
    name = f"{socket.gethostname()} (pid {os.getpid()})"
    first = store.compare_set(f"{key}/name", "", name).decode(errors="replace")
    if store.add(key, 1) > 1:
        raise LaunchError(
            "two hosts have the same --node-rank",
            value=rendezvous.host_rank,
            source=f"{rendezvous.endpoint}, where {first} has it",
            hint=f"give every host its own --node-rank, 0 to {rendezvous.hosts[1] - 1}; "
            "if one was started again, start all of them again",
        )


def _wait_for_all_hosts(store: Any, rendezvous: HostRendezvous) -> None:
    """Effect: as many hosts agree as the job has. Raises: LaunchError."""
    deadline = time.monotonic() + rendezvous.join_seconds
    while (joined := store.add(AGREED, 0)) < rendezvous.hosts[1]:
        if store.check([REFUSED]):
            break
        if time.monotonic() >= deadline:
            raise missing_hosts_error(rendezvous, joined=joined)
        time.sleep(POLL_SECONDS)  # A store cannot wait for one of several keys.
    if store.check([REFUSED]):
        raise _RefusedError(
            "another host refused the job",
            value=store.get(REFUSED).decode(errors="replace"),
            source=rendezvous.endpoint,
            hint="start every host with the same options, and its own --node-rank",
        )


def _wait_for_exit_notices(store: Any, rendezvous: HostRendezvous) -> None:
    """Effect: the host that serves the store keeps it until the others have noticed, or for EXIT_NOTICE_SECONDS."""
    deadline = time.monotonic() + EXIT_NOTICE_SECONDS
    with suppress(RuntimeError):  # The store is gone; the reason for leaving it is what counts.
        connected = store.add(CONNECTED, 0)
        noticed = store.add(NOTICED, 1)
        while rendezvous.host_rank == 0 and noticed < connected and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            noticed = store.add(NOTICED, 0)


def missing_hosts_error(rendezvous: HostRendezvous, *, joined: int | None = None) -> LaunchError:
    """The error for a job that too few hosts joined."""
    count = "" if joined is None else f", {joined} joined"
    return LaunchError(
        "not all hosts joined",
        value=f"--nnodes {rendezvous.nnodes}{count}",
        source=f"{rendezvous.endpoint}, in {rendezvous.join_seconds:g} s (--rdzv-conf join_timeout=N)",
        hint="start cpulaunch on every host, with the same --nnodes, endpoint and --rdzv-id",
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's text; its class name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
