"""Which servers and which file the stores of torch's agent use, and where those that it serves listen."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from functools import wraps

from cpulaunch.launch.hosts.agent.reachability import own_and_other_addresses, reason_of, unreachable_error
from cpulaunch.records.endpoint import is_file_store
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.record import replace
from cpulaunch.system.files.folders import owner_of_new_files
from cpulaunch.system.files.owners import is_ambiguous, is_unmapped
from cpulaunch.system.files.paths import locate, may_be_strangers_name
from cpulaunch.system.files.trust import changeable_part
from cpulaunch.system.files.writing import create
from cpulaunch.system.loopback_store import StrangerError, connected, on_loopback, trusted_users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Any

    from cpulaunch.records.plan import JobPlan
    from cpulaunch.system.files.paths import Place

FILE_HINT = (
    "name a new file in a folder that only you can write, or that is sticky (chmod +t), "
    "or omit store_type=file, which uses TCP"
)


def keep_stores_on_loopback() -> None:
    """Effect: the stores that torch's agent serves at a loopback name listen on loopback only.

    Source: torch 2.13: the agent's modules take TCPStore from torch.distributed, the static and the c10d backend when
    they are imported, the dynamic rendezvous when it makes a store for the ranks.
    """
    import torch.distributed
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    for module in (torch.distributed, c10d_rendezvous_backend, static_tcp_rendezvous):
        setattr(module, "TCPStore", on_loopback(module.TCPStore))  # noqa: B010 - mypy: a class may not be assigned to


def check_servers_of_c10d() -> None:
    """Effect: the store of torch's c10d rendezvous uses no server of another user on this host."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as backend

    setattr(backend, "TCPStore", of_no_stranger(backend.TCPStore))  # noqa: B010 - mypy: as above


def of_no_stranger(make_store: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes the same TCPStore. Where it connects to this host, then to a server of this user or root.

    torch runs code that the store of a c10d rendezvous has. Even a store that serves may reach another user's server:
    where that one listens at ::1, torch's listens for IPv4 alone, and yet connects by IPv6 first.
    """

    @wraps(make_store, updated=())
    def make(host: str, port: int, *, is_master: bool, timeout: timedelta, **more: Any) -> Any:
        options = more | {"is_master": is_master, "timeout": timeout}
        seconds = timeout.total_seconds()
        if is_master and port == 0:
            return make_store(host, port, **options)
        try:
            here, others = own_and_other_addresses(host, timeout_seconds=seconds)
        except (OSError, UnicodeError) as error:
            raise unreachable_error(host, port, reason=reason_of(error)) from None
        if not (here and trusted_users(here[0])):
            return make_store(host, port, **options)
        try:
            return connected(
                lambda address: make_store(address, port, **options),
                [(address, port) for address in here],
                seconds,
                serves=is_master,
                patient=False,
                others=[] if is_master else [(address, port) for address in others],
            )
        except StrangerError as error:
            raise stranger_error(f"{host}:{port}", error) from None

    return make


def stranger_error(endpoint: str, error: StrangerError) -> LaunchError:
    """The error for an endpoint on this host where another user has the server, or may have had it."""
    gone = "the server at the rendezvous endpoint has gone, or is another user's"
    return LaunchError(
        gone if error.user is None else "another user listens at the rendezvous endpoint",
        value=endpoint,
        source=str(error),
        hint="choose another port, the same on every host: --rdzv-endpoint HOST:PORT",
    )


def with_checked_file(job: JobPlan) -> JobPlan:
    """The job with the path without links of its rendezvous file, if it has one, which no other user can change.

    torch opens it anew, by its path, for everything that it reads or writes, follows any link, and runs code that the
    file has. Effect: makes the file, if it is missing. Raises: LaunchError.
    """
    rendezvous = job.rendezvous
    if rendezvous.backend != "c10d" or not is_file_store(dict(rendezvous.conf)) or not rendezvous.endpoint:
        return job
    path = rendezvous.endpoint
    try:
        place = locate(path)
        try:
            resolved, reason = _checked_path(path, place)
        finally:
            os.close(place.folder)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise LaunchError("cannot use the rendezvous file", value=path, source=reason, hint=FILE_HINT) from None
    if reason is not None:
        what = "other users can change the rendezvous file, from which torch runs code"
        raise LaunchError(what, value=path, source=reason, hint=FILE_HINT)
    return replace(job, rendezvous=replace(rendezvous, endpoint=resolved))


def _checked_path(path: str, place: Place) -> tuple[str, str | None]:
    """The path without links of the file in this place, and why other users can change it; None if they cannot.

    Effect: makes it, if it is missing and they cannot exchange it. Raises: OSError.
    """
    resolved = os.path.realpath(path)
    parent, name = os.path.split(resolved)
    if place.is_proc or not os.path.samestat(os.stat(parent, follow_symlinks=False), os.fstat(place.folder)):
        raise OSError(errno.ESTALE, "it is a link of /proc, or was exchanged meanwhile", path)
    if (reason := _changeable_part(parent, place.folder)) is not None:
        return resolved, reason
    with suppress(FileExistsError):
        os.close(create(name, folder=place.folder))
    if (reason := _changeable_part(resolved, place.folder)) is not None:
        return resolved, reason
    status = os.stat(name, dir_fd=place.folder, follow_symlinks=False)  # From here on, others cannot exchange it.
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", path)
    is_linked = may_be_strangers_name(status, place.folder)
    return resolved, "it has several names, in a folder where others can make names" if is_linked else None


def _changeable_part(path: str, folder: int) -> str | None:
    """What of a path others can change, and why; None if nothing. Effect: makes a file in the folder, and removes it.

    On a share that maps users, as NFS does with root, the user to whom it gives files of this one counts as this one.
    """
    reason = changeable_part(path)
    if reason is None:
        return None
    try:
        user = owner_of_new_files(folder)
    except OSError:
        return reason
    if user == os.geteuid() or is_unmapped(user) or is_ambiguous(user):
        return reason
    return changeable_part(path, share=(os.fstat(folder).st_dev, user))
