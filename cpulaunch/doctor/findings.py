"""What a check of doctor finds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cpulaunch.doctor.facts import Facts

Status = Literal["ok", "advice", "problem", "skipped"]
MIB, GIB = 1 << 20, 1 << 30
WITH_COMPILER = "install a C compiler, then: pip install --force-reinstall --no-cache-dir cpulaunch"
"""The command that adds the libraries which an installation without a compiler lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found. `why` and `fix` (a command, or what to change) are for advice and problems."""

    status: Status
    found: str
    why: str | None = None
    fix: str | None = None


Check = Callable[[Facts], tuple[Finding, ...]]


def ok(found: str) -> tuple[Finding, ...]:
    """A finding that needs no action."""
    return (Finding(status="ok", found=found),)


def advice(found: str, *, why: str, fix: str) -> tuple[Finding, ...]:
    """A finding that costs speed, or that breaks some programs only."""
    return (Finding(status="advice", found=found, why=why, fix=fix),)


def problem(found: str, *, why: str, fix: str) -> tuple[Finding, ...]:
    """A finding that breaks most programs or makes them very slow: doctor then exits with code 1."""
    return (Finding(status="problem", found=found, why=why, fix=fix),)


def skipped(reason: str) -> tuple[Finding, ...]:
    """A check that is not possible here, and the reason."""
    return (Finding(status="skipped", found=reason),)
