"""The master port of a job: the kernel chooses it, a socket reserves it while the ranks run; who else listens on it."""

from __future__ import annotations

# `import socket` takes as long as all of cpulaunch's planning: it imports selectors, enum and collections.
import _socket
import errno
import os
import time

from cpulaunch.records.errors import LaunchError, escaped
from cpulaunch.system.files.reading import read_proc
from cpulaunch.system.libc import is_linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

IN_USE = (errno.EADDRINUSE, errno.EACCES)
MAX_NAME = 100
"""Letters shown of the name of a process."""
SEARCH_SECONDS = 1.0
"""For a process among all descriptors of this host, of which another user may open millions."""
LOCAL, STATE, USER, INODE = 1, 3, 7, 9
"""Columns of /proc/net/tcp."""
LISTENS = "0A"


class PortReservation:
    """A port of this host that only processes which name it can bind, for as long as this context lasts.

    A socket is bound to the port with SO_REUSEADDR and never listens. Linux gives the port to no other bind to port 0
    and to no outgoing connection, so jobs that reserve their ports in the same way cannot collide, and no client
    connects to itself. The store of rank 0 can still listen on it, for IPv4 alone or for both families, because it
    sets SO_REUSEADDR as every server does.
    Source: Linux, net/ipv4/inet_connection_sock.c, inet_csk_find_open_port and inet_csk_bind_conflict;
    net/ipv4/inet_hashtables.c, __inet_hash_connect.
    On other systems a bound socket would keep rank 0 out, so the port is chosen and not reserved.
    """

    def __init__(self, port: int | None) -> None:
        """Reserve this port, or for None one that the kernel chooses. Raises: LaunchError if there is none."""
        self._socket = _bound_socket(port or 0)
        self.port: int = self._socket.getsockname()[1]
        if not is_linux():
            self._socket.close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Effect: the port is no longer reserved."""
        self._socket.close()

    def is_taken(self) -> bool:
        """Whether another process listens on the port; False where that is unknown. Call it once all ranks have ended.

        Source: Linux, inet_csk_listen_start asks for the port again, which fails while another socket listens.
        """
        if not is_linux():
            return False
        try:
            self._socket.listen(0)
        except OSError as error:
            return error.errno in IN_USE
        return False


def check_port_free(port: int | None) -> None:
    """Effect: none. Raises: LaunchError if the port is taken, or for None if the kernel has no free port."""
    _bound_socket(port or 0).close()


def _bound_socket(port: int) -> _socket.socket:
    """A socket bound to the port on all addresses, of both families or of IPv4 where the kernel has no IPv6.

    Raises: LaunchError.
    """
    for family, host in ((_socket.AF_INET6, "::"), (_socket.AF_INET, "")):
        try:
            bound = _socket.socket(family, _socket.SOCK_STREAM)
        except OSError:
            continue  # A kernel without IPv6.
        try:
            if family == _socket.AF_INET6:
                bound.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
            bound.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
            return bound
        except OSError as error:
            bound.close()
            if error.errno in IN_USE:
                raise _port_error(port, error) from None
    raise LaunchError("no TCP port for the store of rank 0", value=port or None, hint="is the interface lo up?")


def _port_error(port: int, error: OSError) -> LaunchError:
    if not port:
        return LaunchError("no free TCP port for the store of rank 0", source=os.strerror(error.errno or 0))
    if error.errno == errno.EACCES:
        hint = "choose a port above 1023, or omit --master-port to get a free one"
        return LaunchError("no permission to use the master port", value=port, source="--master-port", hint=hint)
    holder = port_holder(port)
    return LaunchError(
        "the master port is already in use" + (f" by {holder}" if holder else ""),
        value=port,
        source="--master-port",
        hint="on one host, omit --master-port to get a free one",
    )


def port_holder(port: int) -> str | None:
    """The process that listens on the port, as "name (pid N)", in one line: it chooses its name itself.

    None if there is none, if it belongs to another user and is hidden, or is not found in time; on other systems than
    Linux also if this Python has no psutil.
    """
    if not is_linux():
        return _holder_by_psutil(port)
    pid = _listening_process(_listeners(port))
    if pid is None:
        return None
    try:
        return _shown(read_proc(f"/proc/{pid}/comm").decode(errors="backslashreplace").removesuffix("\n"), pid)
    except OSError:
        return None


def _holder_by_psutil(port: int) -> str | None:
    try:
        import psutil
    except ImportError:  # torch's agent asks too, in a Python of the user's choice.
        return None
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return _shown(psutil.Process(connection.pid).name(), connection.pid)
    except (psutil.Error, OSError):
        return None
    return None


def _shown(name: str, pid: str | int) -> str:
    return f"{escaped(name[:MAX_NAME])} (pid {pid})"


def _listeners(port: int) -> dict[str, int]:
    """What links to sockets that listen on the port look like in /proc/PID/fd, and the user who made each.

    Source: Linux, Documentation/networking/proc_net_tcp.rst; the kernel lists sockets that listen first.
    """
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            rows = read_proc(f"/proc/net/{table}").decode("ascii", "replace").splitlines()[1:]
        except OSError:
            continue  # A kernel without IPv6.
        for row in map(str.split, rows):
            if len(row) > INODE and row[STATE] == LISTENS and row[LOCAL].endswith(f":{port:04X}"):
                found[f"socket:[{row[INODE]}]"] = int(row[USER])
    return found


def _listening_process(sockets: Mapping[str, int]) -> int | None:
    """The id of a process that has one of these sockets; None if none is found in SEARCH_SECONDS.

    The latest processes of the sockets' users come first: older ones may have any number of descriptors. Of a server
    and what it has forked, it is the server.
    """
    if not sockets:
        return None
    from cpulaunch.system.process_state import PARENT, process_ids, stat_field  # Few launches need it.

    deadline = time.monotonic() + SEARCH_SECONDS
    pids = sorted(process_ids(os.listdir("/proc")), reverse=True)
    for pid in sorted(pids, key=lambda pid: _owner(pid) not in sockets.values()):
        if time.monotonic() > deadline:
            break
        if not _has_one_of(pid, sockets, deadline):
            continue
        while (parent := stat_field(pid, PARENT)) and _has_one_of(parent, sockets, deadline):
            pid = parent
        return pid
    return None


def _has_one_of(pid: int, sockets: Mapping[str, int], deadline: float) -> bool:
    """Whether the process has one of these sockets; False if it is not found until the deadline."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as descriptors:
            for each in descriptors:
                if time.monotonic() > deadline:
                    return False
                if _target(each.path) in sockets:
                    return True
    except OSError:
        return False  # It has ended, or is another user's.
    return False


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def check_address(address: str) -> None:
    """Effect: none. Raises: LaunchError if the name of the host of rank 0 does not resolve."""
    if address in ("localhost", "127.0.0.1", "::1"):
        return
    try:
        _socket.getaddrinfo(address, None)
    except OSError as error:
        source = f"--master-addr: {error.strerror or error}"
        hint = "omit --master-addr on one host"
        raise LaunchError("the master address does not resolve", value=address, source=source, hint=hint) from None
