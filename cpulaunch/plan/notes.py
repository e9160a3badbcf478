"""Notes on the settings that no decision of its own explains."""

from cpulaunch.cpulist import format_cpulist
from cpulaunch.host import Host
from cpulaunch.plan.model import Note
from cpulaunch.plan.placement import Placement
from cpulaunch.request import LaunchRequest
from cpulaunch.settings import rows

_EXPLAINED = frozenset(
    (
        *("instances", "cores_per_instance", "cpus", "numa_nodes", "membind", "binder", "threads"),
        *("openmp", "allocator", "mkl_dispatch", "profile", "env"),
    )
)
"""Settings with a note of their own, or that are the notes on variables."""

_BINDERS = {
    "native": "system calls before the program starts, inherited by all of its threads",
    "numactl": "numactl starts each worker",
    "taskset": "taskset starts each worker; it chooses CPUs only",
    "none": "nobody binds: the kernel moves threads as it likes",
}


def instances_note(request: LaunchRequest, placement: Placement) -> Note:
    """How many workers, and how they divide the pool."""
    origins = (request.origin("instances"), request.origin("cores_per_instance"))
    origin = next((origin for origin in origins if origin != "default"), "default")
    return Note(setting="instances", value=str(len(placement.slots)), origin=origin, reason=placement.reason)


def binder_note(host: Host, request: LaunchRequest) -> Note:
    """Who binds, and how."""
    binder = request.settings.binder
    reason = request.reasons.get("binder", _BINDERS[binder])
    if not host.can_bind:
        reason = "this operating system does not let a process choose its CPUs"
    return Note(setting="binder", value=binder, origin=request.origin("binder"), reason=reason)


def asked_notes(request: LaunchRequest) -> tuple[Note, ...]:
    """A note on each other setting that somebody chose."""
    return tuple(
        Note(
            setting=name,
            value=_text(getattr(request.settings, name)),
            origin=request.origin(name),
            reason=request.reasons.get(name, row.help),
        )
        for name, row in rows().items()
        if name in request.origins and name not in _EXPLAINED
    )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return format_cpulist(value) if isinstance(value, frozenset) else str(value)
