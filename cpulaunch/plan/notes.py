"""Notes on the settings that no decision of its own explains."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import Host
from cpulaunch.records.plan import Note
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.settings import Row, rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeGuard

_EXPLAINED = frozenset(
    (
        *("instances", "cores_per_instance", "cpus", "numa_nodes", "membind", "binder", "threads"),
        *("openmp", "allocator", "mkl_dispatch", "dataloader_workers", "profile", "env", "nproc_per_node", "device"),
        *("dist_backend", "ccl_workers", "ccl_path"),
    )
)
"""Settings with a note of their own, or that are the notes on variables."""

_FOR_RANKS = ("device", "scheduler", "ccl_workers", "ccl_worker_siblings")
"""Settings that only ranks of this launch have; a backend is also for those that a program starts itself."""

_BINDERS = {
    "native": "system calls before the program starts, inherited by all of its threads",
    "numactl": "numactl starts each worker",
    "taskset": "taskset starts each worker; it chooses CPUs only",
    "none": "nobody binds: the kernel moves threads as it likes",
}


def instances_note(request: LaunchRequest, placement: Placement) -> Note:
    """How many workers, and how they divide the pool."""
    if request.distributed:
        name = "nproc_per_node"
        beaten = request.reasons.get(name, "") if request.origin(name) == "cli" else ""
        reason = "; ".join(filter(None, (placement.reason, beaten)))
        return Note(setting=name, value=str(len(placement.workers)), origin=request.origin(name), reason=reason)
    origins = (request.origin("instances"), request.origin("cores_per_instance"))
    origin = next((origin for origin in origins if origin != "default"), "default")
    return Note(setting="instances", value=str(len(placement.workers)), origin=origin, reason=placement.reason)


def binder_note(host: Host, request: LaunchRequest) -> Note:
    """Who binds, and how."""
    binder = request.settings.binder
    reason = request.reasons.get("binder", _BINDERS[binder])
    if not host.can_bind:
        reason = "this operating system does not let a process choose its CPUs"
    return Note(setting="binder", value=binder, origin=request.origin("binder"), reason=reason)


def notice_notes(request: LaunchRequest) -> tuple[Note, ...]:
    """What of torchrun's variables does not count for instances."""
    if request.distributed:  # There the flag's own note says what it wins over.
        return ()
    return tuple(Note(setting="distributed", value="off", origin="cli", reason=each) for each in request.notices)


def asked_notes(request: LaunchRequest, not_applied: Mapping[str, str]) -> tuple[Note, ...]:
    """A note on each other setting that somebody chose. `not_applied`: why those that are not applied are not."""
    return tuple(
        Note(
            setting=name,
            value=_text(row.default if name in not_applied else getattr(request.settings, name)),
            origin=request.origin(name),
            reason=f"not applied: {not_applied[name]}" if name in not_applied else _reason(request, row),
        )
        for name, row in rows().items()
        if name in request.origins and (name not in _EXPLAINED or _idle(request, name))
    )


def _idle(request: LaunchRequest, name: str) -> bool:
    """Whether this belongs to a job of ranks, and there is none."""
    return name in _FOR_RANKS and not request.distributed


def _reason(request: LaunchRequest, row: Row) -> str:
    value = getattr(request.settings, row.name)
    if _idle(request, row.name):
        return "without effect: it is for a job of ranks"
    usual = row.kind.flag and value == row.default
    meant = "as it is by default" if usual else _MEANINGS.get((row.name, value), row.help)
    return request.reasons.get(row.name, meant)


_MEANINGS = {
    (
        "graph",
        "onednn",
    ): "modules in eval mode run as frozen graphs of fused oneDNN operations; results differ by rounding",
    ("graph", "inductor"): "torch.compile with freezing for modules in eval mode; the first calls take seconds",
    ("graph", "zentorch"): "AMD's compiler for modules in eval mode; the first calls take seconds",
    ("graph", "off"): "modules run as they are written",
    ("precision", "bf16"): "autocast: products with 8 bits of precision, results differ in the third digit",
    ("precision", "fp16"): "autocast: products with 11 bits of precision, and nothing above 65504",
    ("precision", "tf32"): "fp32 products may be computed with 11 bits of precision, where the hardware has such",
    ("precision", "medium"): "fp32 products may be computed in bf16, with 8 bits of precision",
    ("precision", "fp32"): "fp32 products in full precision",
    ("debug_apis", False): "anomaly detection, emit_nvtx and gradcheck do nothing",
}
"""What a choice does, where the help has one line for several."""


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "default"
    if isinstance(value, tuple):
        return _joined(value)
    return format_cpulist(value) if isinstance(value, frozenset) else str(value)


def _joined(values: tuple[object, ...]) -> str:
    """Values as they are written on a command line: 1:2 (a range), 0:3,1:1 and K=V,... (pairs), A,B."""
    if len(values) == 2 and all(isinstance(each, int) for each in values):
        return f"{values[0]}:{values[1]}" if values[0] != values[1] else str(values[0])
    pairs = [("=" if isinstance(each[1], str) else ":").join(map(str, each)) for each in values if _is_pair(each)]
    return ",".join(pairs or map(str, values))


def _is_pair(value: object) -> TypeGuard[tuple[object, object]]:
    return isinstance(value, tuple) and len(value) == 2
