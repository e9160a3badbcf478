"""What else happened on the machine while a launch ran, from counters of the kernel before and after it.

Source: proc(5), /proc/stat and /proc/vmstat; kernel, Documentation/admin-guide/cgroup-v2.rst (cpu.stat), cgroup-v1;
getrusage(2); Linux, drivers/thermal/intel/therm_throt.c (thermal_throttle).
"""

from __future__ import annotations

from cpulaunch.measure.samples import Disturbance
from cpulaunch.probe.cgroups import read_cgroups
from cpulaunch.records.record import record
from cpulaunch.system.root import natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.records.host import Budget
    from cpulaunch.system.root import Root

TICKS_PER_SECOND = 100
"""The unit of /proc/stat on every architecture that runs torch. Source: proc(5), USER_HZ."""
CPU_FOLDER = "sys/devices/system/cpu"
IDLE_FIELDS = (3, 4)
STEAL_FIELD = 7
TIME_FIELDS = 8
"""Fields of a line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal; guest is part of user."""

MOST_STEAL = 0.02
MOST_OTHER_CPUS, MOST_OTHER_SHARE = 0.5, 0.2
MOST_THROTTLED = 0.02
"""More than this in a sample, and the sample is called disturbed; throttling is a share of the sample's seconds, and
other processes may use neither more than half a CPU nor a fifth of those that may be used.
"""


@record
class Counters:
    """The kernel's counters at one moment; all grow only. Times are in seconds, over the CPUs that may be used."""

    busy: float = 0.0
    idle: float = 0.0
    steal: float = 0.0
    throttled: float = 0.0
    thermal_events: int = 0
    oom_kills: int = 0


@record
class LaunchUsage:
    """What the processes of a launch used: CPU time in seconds, and involuntary context switches."""

    cpu_seconds: float = 0.0
    involuntary_switches: int = 0


def read_counters(root: Root, cpus: frozenset[int] | None = None) -> Counters:
    """The counters of now, of these CPUs (None: of all); those that the kernel does not tell are zero."""
    times = _cpu_times(root.text("proc/stat") or "", cpus)
    idle, steal = sum(times[at] for at in IDLE_FIELDS), times[STEAL_FIELD]
    return Counters(
        busy=sum(times) - idle - steal,
        idle=idle,
        steal=steal,
        throttled=_throttled_seconds(root),
        thermal_events=_thermal_events(root, cpus),
        oom_kills=int(_value(root.text("proc/vmstat") or "", "oom_kill")),
    )


def disturbance_between(
    before: Counters, after: Counters, usage: LaunchUsage, *, seconds: float, budget: Budget | None = None
) -> Disturbance:
    """What happened between two moments, `seconds` apart, besides what the launch itself used.

    `budget`: of whose CPUs the counters are. With a quota, fewer threads run than there are CPUs: of what others used,
    the part counts that is expected to be on the same CPUs.
    """
    stolen = max(0.0, after.steal - before.steal)
    total = after.busy - before.busy + after.idle - before.idle + stolen
    others = after.busy - before.busy - usage.cpu_seconds
    share = 1.0 if budget is None or not budget.cpus else min(1.0, budget.threads / len(budget.cpus))
    return Disturbance(
        steal=stolen / total if total > 0 else 0.0,
        other_cpus=max(0.0, share * others / seconds) if seconds > 0 else 0.0,
        threads=None if budget is None else budget.threads,
        throttled_seconds=max(0.0, after.throttled - before.throttled),
        thermal_events=max(0, after.thermal_events - before.thermal_events),
        involuntary_switches=usage.involuntary_switches,
        oom_kills=max(0, after.oom_kills - before.oom_kills),
    )


def disturbance_reasons(disturbance: Disturbance, *, seconds: float) -> tuple[str, ...]:
    """What made a sample a disturbed one, in words; empty if nothing did."""
    throttled = disturbance.throttled_seconds
    most = MOST_OTHER_CPUS
    if disturbance.threads is not None:
        most = min(most, MOST_OTHER_SHARE * disturbance.threads)
    found = {
        f"{disturbance.steal:.0%} of the CPU time went to other virtual machines": disturbance.steal > MOST_STEAL,
        f"other processes used {disturbance.other_cpus:.1f} CPUs": disturbance.other_cpus > most,
        f"a CPU quota held it back for {throttled:.2g} s": throttled > MOST_THROTTLED * seconds,
        "a core was slowed because it was hot": disturbance.thermal_events > 0,
    }
    return tuple(text for text, holds in found.items() if holds)


def _cpu_times(text: str, cpus: frozenset[int] | None) -> list[float]:
    """The times of a machine's CPUs, or of some of them, in seconds and in the order of the fields."""
    lines = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    names = {"cpu"} if cpus is None else {f"cpu{number}" for number in cpus}
    chosen = [line[1 : TIME_FIELDS + 1] for line in lines if line[0] in names] or [line[1:] for line in lines[:1]]
    rows = [[(natural(each) or 0) / TICKS_PER_SECOND for each in row] for row in chosen]
    return [sum(row[at] for row in rows if at < len(row)) for at in range(TIME_FIELDS)]


def _value(text: str, name: str) -> float:
    """The number after a name in a file of "name number" lines; 0 if there is none."""
    for line in text.splitlines():
        key, _, number = line.partition(" ")
        if key == name:
            return float(natural(number.strip()) or 0)
    return 0.0


def _throttled_seconds(root: Root) -> float:
    """How long a CPU quota has held back this process's cgroup or one above it, whichever was longest."""
    seconds = [0.0]
    for version, folders in read_cgroups(root).folders(root, "cpu"):
        name, unit = ("throttled_usec", 1e-6) if version == 2 else ("throttled_time", 1e-9)
        seconds += [_value(root.text(f"{folder}/cpu.stat") or "", name) * unit for folder in folders]
    return max(seconds)


def _thermal_events(root: Root, cpus: frozenset[int] | None) -> int:
    """How often the cores of these CPUs have been slowed because they were hot."""
    names = (name for name in root.names(CPU_FOLDER) if cpus is None or natural(name[3:]) in cpus)
    texts = (root.text(f"{CPU_FOLDER}/{name}/thermal_throttle/core_throttle_count") for name in names)
    return sum(natural(text) or 0 for text in texts if text is not None)
