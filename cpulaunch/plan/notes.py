"""Notes on the settings that no decision of its own explains."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement
from cpulaunch.records.host import Host
from cpulaunch.records.plan import Note
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.settings import SettingSpec, setting_specs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

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


def setting_notes(request: LaunchRequest, not_applied: Mapping[str, str]) -> tuple[Note, ...]:
    """A note for each setting that is not at its default and has no note of its own.

    `not_applied`: the reasons of settings that are not applied.
    """
    chosen = tuple(
        Note(
            setting=name,
            value=_text(spec, spec.default if name in not_applied else getattr(request.settings, name)),
            origin=request.origin(name),
            reason=f"not applied: {not_applied[name]}" if name in not_applied else _reason(request, spec),
        )
        for name, spec in setting_specs().items()
        if name in request.origins and (name not in _EXPLAINED or _idle(request, name))
    )
    if request.distributed:  # There the note on the flag says which of torchrun's variables it overrides.
        return chosen
    ignored = (Note(setting="distributed", value="off", origin="cli", reason=each) for each in request.notices)
    return (*ignored, *chosen)


def _idle(request: LaunchRequest, name: str) -> bool:
    """Whether this belongs to a job of ranks, and there is none."""
    return name in _FOR_RANKS and not request.distributed


def _reason(request: LaunchRequest, spec: SettingSpec) -> str:
    value = getattr(request.settings, spec.name)
    if _idle(request, spec.name):
        return "without effect: it is for a job of ranks"
    usual = spec.value_type.flag and value == spec.default
    meant = "as it is by default" if usual else _MEANINGS.get((spec.name, value), spec.help)
    return request.reasons.get(spec.name, meant)


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


def _text(spec: SettingSpec, value: object) -> str:
    if value is None:
        return "default"
    if spec.value_type.flag:
        return "on" if value else "off"
    return spec.value_type.to_text(value)
