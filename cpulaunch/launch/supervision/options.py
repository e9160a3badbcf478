"""How a launch's workers are supervised."""

from __future__ import annotations

from cpulaunch.records.record import record
from cpulaunch.system.signals import ENDING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from cpulaunch.launch.monitor.watch import Watch
    from cpulaunch.launch.process.bind import Notify
    from cpulaunch.launch.process.processes import Guards
    from cpulaunch.launch.process.spawn import Inherited
    from cpulaunch.system.control_group import LaunchCgroup


@record
class SupervisorOptions:
    """How the workers are supervised. `control`: the pipe from the guard; `memory_events`: the cgroup's file, if any.

    `cgroup` holds this process and what it starts; it `adopts_orphans` where the kernel lets it.
    `ending_signals` end the launch; other signals are forwarded to the workers. `of_launchers`: the workers are
    launchers themselves, which see no failure while a process that they started stops them.
    """

    inherited: Inherited
    grace_seconds: float
    control: int
    guards: Guards = ()
    memory_events: str | None = None
    watch: Watch | None = None
    ending_signals: frozenset[int] = ENDING
    cgroup: LaunchCgroup | None = None
    adopts_orphans: bool = False
    of_launchers: bool = False
    ending_seconds: Callable[[bool], float] = lambda failed: 0.0
    """How much of the grace period is over for what workers of a launcher leave, when that ends: by whether it has
    failed before the launch was ending."""
    notify: Notify | None = None
    """Says after Ctrl-C what the launch waits for, and at the end what could not be ended."""
    on_started: Callable[[], None] | None = None
    """Called when all workers execute their programs, and before if the cgroup is waited for: imports what the launch
    needs at its end.

    Not else before, because the workers would start later, as they would with a `watch`, whose reports take longer to
    import than that wait; nor at the end, because the package may be gone by then.
    """
