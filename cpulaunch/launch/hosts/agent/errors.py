"""What torch elastic raises, in words for a person; imported only where torch is."""

from __future__ import annotations

from contextlib import contextmanager

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from cpulaunch.launch.hosts.agent.rendezvous import Meeting, too_few_hosts
from cpulaunch.records.errors import CpulaunchError, LaunchError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FAILURES = (RendezvousError, DistError, RuntimeError, OSError, ValueError, AttributeError, AssertionError, KeyError)
"""What torch's agent is known to raise, besides what it says about ranks and signals."""


@contextmanager
def explained(meeting: Meeting) -> Iterator[None]:
    """A context in which torch's errors become ours. Raises: LaunchError or UsageError."""
    try:
        yield
    except CpulaunchError:
        raise
    except FAILURES as error:
        raise explanation(error, meeting) from error


def explanation(error: BaseException, meeting: Meeting) -> CpulaunchError:
    """The error that says the same to a person."""
    detail = _innermost(error)
    if isinstance(error, RendezvousTimeoutError) or "imeout" in type(error).__name__ or "imed out" in str(error):
        return too_few_hosts(meeting)
    if isinstance(error, RendezvousClosedError):
        return LaunchError(
            "the job has ended on another host",
            value=f"--rdzv-id {meeting.run_id}",
            source=meeting.endpoint,
            hint="look at the other hosts' output; a new job at the same endpoint needs a new --rdzv-id",
        )
    if isinstance(error, (RendezvousConnectionError, DistError, ConnectionError)):
        return LaunchError(
            "the rendezvous was lost",
            value=meeting.endpoint,
            source=detail,
            hint="the host that serves it has ended or cannot be reached: look at its output",
        )
    if isinstance(error, ValueError):
        return UsageError(
            "torch's elastic agent refuses the job", value=_first_line(error), hint="check the rendezvous options"
        )
    return LaunchError(
        "torch's elastic agent failed",
        value=detail,
        source=type(error).__name__,
        hint="LOGLEVEL=INFO shows what it was doing",
    )


def _innermost(error: BaseException) -> str:
    """The first line of what caused it all."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
