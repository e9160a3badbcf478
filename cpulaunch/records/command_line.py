"""A parsed command line of `run`, `plan` or `torchrun`, before profiles and defaults are merged into it."""

from __future__ import annotations

from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cpulaunch.records.request import Layer, Program, WorkerPython


@record
class CommandLine:
    """The settings by name, the program, and how to print the plan.

    `torchrun`: the command line is torchrun's, so the launch is a job of ranks. `layers` have a lower precedence than
    `values`, the first the highest; `notices` name the values that others override, one line each. `warnings` are
    about the program. `python`: the Python that was chosen for workers.
    """

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    python: WorkerPython | None = None
    torchrun: bool = False
    program: Program | None = None
    switches: frozenset[str] = frozenset()
    emit: str | None = None
    sysroot: str | None = None

    @property
    def only_plan(self) -> bool:
        """Whether these options ask for the plan instead of a launch."""
        brief = "--brief" in self.switches and "--verbose" not in self.switches
        return brief or self.emit is not None or bool(self.switches & {"--dry-run", "--json"})
