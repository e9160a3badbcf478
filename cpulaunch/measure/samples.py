"""What is measured: the sides of a comparison, where the figure comes from, and the samples."""

from __future__ import annotations

from cpulaunch.records.record import field, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

WALL_TIME = "wall time"


@record
class Side:
    """A way to launch a program: with these options of cpulaunch, or `plain`, by Python alone."""

    label: str
    options: tuple[str, ...] = ()
    plain: bool = False


@record
class MetricChoice:
    """Where the figure comes from.

    `name`: a metric that the program reports with cpulaunch.metric(). `pattern`: a regular expression whose group finds
    it in the output. Neither: the wall time of the launch, in seconds.
    """

    name: str | None = None
    pattern: str | None = None
    lower_is_better: bool = True


@record
class Disturbance:
    """What else happened on the machine during a sample.

    `steal`: share of all CPU time that the hypervisor gave to others. `other_cpus`: CPUs that other processes used, in
    the mean. `throttled_seconds`: how long the CPU quota of a cgroup held processes back. `thermal_events`: times that
    a core was slowed because of its temperature. `involuntary_switches`: times that a thread of the launch had to make
    room for another one. `oom_kills`: processes that the kernel ended for want of memory. A kernel that does not tell
    counts nothing. `threads`: how many CPUs could be used at a time, to which these are related; None: not known.
    """

    steal: float = 0.0
    other_cpus: float = 0.0
    throttled_seconds: float = 0.0
    thermal_events: int = 0
    involuntary_switches: int = 0
    oom_kills: int = 0
    threads: int | None = None


UNDISTURBED = Disturbance()


@record
class Sample:
    """One launch. `value` is in the metric's unit, None if there is a `failure`, which says why in one sentence.

    `metrics`: every figure that the program reported, of all workers together. `report`: the launch's own report; None
    where there was none. `seconds`: wall time. `exit_code`: minus the signal if one ended it; None after a time limit.
    """

    value: float | None
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    checksums: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    exit_code: int | None = 0
    disturbance: Disturbance = UNDISTURBED
    report: Mapping[str, Any] | None = None
