"""A parsed command line of `run` or `plan`, before profiles and the environment add to it."""

from __future__ import annotations

from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cpulaunch.records.request import Layer, Program


@record
class CommandLine:
    """What was typed: settings by name, the program, and how to show the plan.

    `job`: whatever is asked for is a job of ranks. `layers` come behind the values, in order of precedence; `notices`
    say in one line each what was asked for twice.
    """

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    notices: tuple[str, ...] = ()
    job: bool = False
    program: Program | None = None
    switches: frozenset[str] = frozenset()
    emit: str | None = None
    sysroot: str | None = None
