"""The master port of a job: chosen by the kernel, held while the ranks run, and whoever else took it."""

from __future__ import annotations

# `import socket` takes as long as all of cpulaunch's planning: selectors, enum and collections for its constants.
import _socket
import errno
import os

from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import record
from cpulaunch.system.libc import is_linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

TAKEN = (errno.EADDRINUSE, errno.EACCES)
LISTENING = "0A"
"""Source: proc(5) net/tcp, field st; TCP_LISTEN in include/net/tcp_states.h."""


class Reservation:
    """A port of this host that only those who name it can take, for as long as this context lasts.

    A socket is bound to it with SO_REUSEADDR and never listens. Linux gives the port to no other bind to port 0 and to
    no connection's own end, so jobs that choose theirs in the same way cannot collide and no client connects to
    itself; while rank 0's store, which sets SO_REUSEADDR as every server does, binds and listens on it, for IPv4
    alone or for both families.
    Source: Linux, net/ipv4/inet_connection_sock.c, inet_csk_find_open_port and inet_csk_bind_conflict;
    net/ipv4/inet_hashtables.c, __inet_hash_connect.
    Elsewhere a bound socket would keep rank 0 out: the port is only chosen.
    """

    def __init__(self, port: int | None) -> None:
        """Raises: LaunchError if this port is taken, or none is free."""
        self._socket = _bound(port or 0)
        self.port: int = self._socket.getsockname()[1]
        if not is_linux():
            self._socket.close()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Effect: the port is anybody's."""
        self._socket.close()

    def is_taken(self) -> bool:
        """Whether somebody else listens on the port now that all ranks are gone.

        Source: Linux, inet_csk_listen_start asks for the port again, which a listening socket then refuses.
        """
        if not is_linux():
            return False
        try:
            self._socket.listen(0)
        except OSError as error:
            return error.errno in TAKEN
        return False


def _bound(port: int) -> _socket.socket:
    """A socket bound to the port on all addresses of both families, or of IPv4 where there is no other."""
    for family, host in ((_socket.AF_INET6, "::"), (_socket.AF_INET, "")):
        try:
            made = _socket.socket(family, _socket.SOCK_STREAM)
        except OSError:
            continue  # A kernel without IPv6.
        try:
            if family == _socket.AF_INET6:
                made.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
            made.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            return made
        except OSError as error:
            made.close()
            if error.errno in TAKEN:
                raise _taken(port, error) from None
    raise LaunchError("no port for rank 0's store", value=port or None, hint="is there a network, if only lo?")


def _taken(port: int, error: OSError) -> LaunchError:
    if not port:
        return LaunchError("no port is free for rank 0's store", source=os.strerror(error.errno or 0))
    if error.errno == errno.EACCES:
        hint = "choose a port above 1023, or none: a free one is found"
        return LaunchError("the master port is not permitted", value=port, source="--master-port", hint=hint)
    holder = holder_of(port)
    return LaunchError(
        "the master port is taken" + (f" by {holder}" if holder else ""),
        value=port,
        source="--master-port",
        hint="leave --master-port away on one host: a free one is found",
    )


@record
class Holder:
    """A process that listens."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


def holder_of(port: int) -> Holder | None:
    """Who listens on the port; None if nobody does, or it is another user's secret."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return None
    links = {f"socket:[{inode}]" for inode in inodes}
    for pid in _pids():
        if links & set(_links(pid)):
            return Holder(pid=pid, name=_name(pid))
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    """Source: proc(5), net/tcp: the fields sl local_address rem_address st ... inode, the port in hex."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file]
        except OSError:
            continue
        for row in rows[1:]:
            if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port:
                yield row[9]


def _pids() -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        return []


def _links(pid: int) -> Iterator[str]:
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            yield os.readlink(f"/proc/{pid}/fd/{name}")
    except OSError:
        return


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return "a process"


def check_address(address: str) -> None:
    """Effect: none. Raises: LaunchError if the ranks could never find rank 0 by this name."""
    if address in ("localhost", "127.0.0.1", "::1"):
        return
    try:
        _socket.getaddrinfo(address, None)
    except OSError as error:
        source = f"--master-addr: {error.strerror or error}"
        hint = "leave --master-addr away on one host"
        raise LaunchError("the master address does not resolve", value=address, source=source, hint=hint) from None
