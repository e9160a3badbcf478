"""torch elastic's exceptions as errors with a cause and a hint; imported only where torch is."""

from __future__ import annotations

from contextlib import contextmanager

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from cpulaunch.launch.hosts.agent.rendezvous import HostRendezvous, first_line, missing_hosts_error
from cpulaunch.records.errors import CpulaunchError, LaunchError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FAILURES = (RendezvousError, DistError, RuntimeError, OSError, ValueError, AttributeError, AssertionError, KeyError)
"""What torch's agent is known to raise, besides its errors for failed ranks and signals."""


@contextmanager
def translated_errors(rendezvous: HostRendezvous) -> Iterator[None]:
    """A context that replaces torch's exceptions. Raises: LaunchError or UsageError."""
    try:
        yield
    except CpulaunchError:
        raise
    except FAILURES as error:
        raise translate(error, rendezvous) from error


def translate(error: BaseException, rendezvous: HostRendezvous) -> CpulaunchError:
    """The error to show in place of one of torch's."""
    if isinstance(error, RendezvousTimeoutError) or "imeout" in type(error).__name__ or "imed out" in str(error):
        return missing_hosts_error(rendezvous)
    if isinstance(error, RendezvousClosedError):
        return LaunchError(
            "the job has already ended on another host",
            value=f"--rdzv-id {rendezvous.run_id}",
            source=rendezvous.endpoint,
            hint="see the other hosts' output; a new job at the same endpoint needs a new --rdzv-id",
        )
    if isinstance(error, (RendezvousConnectionError, DistError, ConnectionError)):
        return LaunchError(
            "lost the connection to the rendezvous",
            value=rendezvous.endpoint,
            source=_root_cause(error),
            hint="the host that serves it has exited or is unreachable: see its output",
        )
    if isinstance(error, ValueError):
        return UsageError(
            "torch's elastic agent rejected the job", value=first_line(error), hint="check the rendezvous options"
        )
    return LaunchError(
        "torch's elastic agent failed",
        value=_root_cause(error),
        source=type(error).__name__,
        hint="LOGLEVEL=INFO shows what it was doing",
    )


def _root_cause(error: BaseException) -> str:
    """The first line of the exception at the end of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
