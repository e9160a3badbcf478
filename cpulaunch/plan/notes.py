"""Notes on the settings that no other decision explains."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement
from cpulaunch.records.host import Host
from cpulaunch.records.plan import Note
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.settings import setting_specs
from cpulaunch.records.value_types import SettingSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.plan.plugin.checks import TorchChoices

_NOTED_ELSEWHERE = frozenset(
    (
        *("instances", "cores_per_instance", "cpus", "numa_nodes", "membind", "binder", "threads"),
        *("openmp", "allocator", "mkl_dispatch", "dataloader_workers", "profile", "env", "nproc_per_node", "device"),
        "python",
        *("dist_backend", "ccl_workers", "ccl_path"),
    )
)
"""Settings that have a note from the decision they belong to, or whose notes are those on variables."""

_RANK_SETTINGS = ("device", "scheduler", "ccl_workers", "ccl_worker_siblings")
"""Settings that take effect only for ranks of this launch."""

_BINDERS = {
    "native": "system calls before the program starts; all of its threads inherit the binding",
    "numactl": "numactl starts and binds each worker",
    "taskset": "taskset starts each worker and binds it to CPUs, not to memory",
    "none": "workers are not bound: the kernel may run their threads on any CPU",
}


def instances_note(request: LaunchRequest, placement: Placement) -> Note:
    """The number of workers, and how they divide the pool."""
    if request.distributed:
        name = "nproc_per_node"
        overridden = request.reasons.get(name, "") if request.origin(name) == "cli" else ""
        reason = "; ".join(filter(None, (placement.reason, overridden)))
        return Note(setting=name, value=str(len(placement.workers)), origin=request.origin(name), reason=reason)
    origins = (request.origin("instances"), request.origin("cores_per_instance"))
    origin = next((origin for origin in origins if origin != "default"), "default")
    return Note(setting="instances", value=str(len(placement.workers)), origin=origin, reason=placement.reason)


def binder_note(host: Host, request: LaunchRequest) -> Note:
    """What binds the workers."""
    binder = request.settings.binder
    reason = request.reasons.get("binder", _BINDERS[binder])
    if not host.can_bind:
        reason = "this operating system does not let a process choose its CPUs"
    return Note(setting="binder", value=binder, origin=request.origin("binder"), reason=reason)


def python_notes(host: Host, request: LaunchRequest) -> tuple[Note, ...]:
    """The note on the Python that runs the workers, and on its torch."""
    python = request.python
    if python is None:
        return ()
    torch = "no torch" if host.torch_known else "its torch is not known"
    if host.torch is not None:
        torch = f"torch {host.torch.version}"
    return (Note(setting="python", value=python.path, origin=python.origin, reason=f"{python.reason}; {torch}"),)


def setting_notes(request: LaunchRequest, choices: TorchChoices) -> tuple[Note, ...]:
    """A note on each setting that the user or a profile chose and that no other decision explains."""
    not_applied = choices.not_applied
    chosen = tuple(
        Note(
            setting=name,
            value=_text(spec, spec.default if name in not_applied else getattr(request.settings, name)),
            origin=request.origin(name),
            reason=f"not applied: {not_applied[name]}"
            if name in not_applied
            else "; ".join(filter(None, (_reason(request, spec), choices.remarks.get(name)))),
        )
        for name, spec in setting_specs().items()
        if name in request.origins and (name not in _NOTED_ELSEWHERE or _lacks_ranks(request, name))
    )
    if request.distributed:  # There the note on the flag says which of torchrun's variables it overrides.
        return chosen
    ignored = (Note(setting="distributed", value="off", origin="cli", reason=each) for each in request.notices)
    return (*ignored, *chosen)


def _lacks_ranks(request: LaunchRequest, name: str) -> bool:
    """Whether a setting takes effect only for ranks, and the launch has none."""
    return name in _RANK_SETTINGS and not request.distributed


def _reason(request: LaunchRequest, spec: SettingSpec) -> str:
    value = getattr(request.settings, spec.name)
    if _lacks_ranks(request, spec.name):
        return "no effect: this launch has no ranks"
    if spec.name in request.reasons:
        return request.reasons[spec.name]
    if spec.value_type.flag and value == spec.default:
        return "the default"
    return _EFFECTS.get((spec.name, value), spec.help)


_EFFECTS = {
    ("graph", "onednn"): "modules in eval mode run as graphs of fused oneDNN operations; results differ by rounding",
    ("graph", "inductor"): "torch.compile with freezing for modules in eval mode; the first calls take seconds",
    ("graph", "zentorch"): "AMD's compiler for modules in eval mode; the first calls take seconds",
    ("graph", "off"): "modules run eagerly, as they are written",
    ("precision", "bf16"): "autocast to bf16: products have 8 bits of precision, so results differ in the third digit",
    ("precision", "fp16"): "autocast to fp16: products have 11 bits of precision and overflow above 65504",
    ("precision", "tf32"): "fp32 products may use tf32, with 11 bits of precision, where the hardware supports it",
    ("precision", "medium"): "fp32 products may use bf16, with 8 bits of precision",
    ("precision", "fp32"): "fp32 products have full precision",
    ("weights", "fp32"): "modules in eval mode keep their weights packed for oneDNN; results differ by rounding",
    ("weights", "bf16"): "modules in eval mode keep their weights in bf16, half the bytes to read, 8 bits of precision",
    ("weights", "int8"): "modules in eval mode keep their weights in int8, a quarter of the bytes to read",
    ("weights", "int4"): "modules in eval mode keep their weights in int4, a seventh of the bytes to read",
    ("graph_budget", 0.0): "nothing is captured",
    ("report", "-"): "stdout has the report alone: what workers write to stdout goes to stderr",
    ("debug_apis", False): "anomaly detection, emit_nvtx and gradcheck do nothing",
}
"""What a choice does, where the help describes several choices in one line."""


def _text(spec: SettingSpec, value: object) -> str:
    if value is None:
        return "default"
    if spec.value_type.flag:
        return "on" if value else "off"
    return spec.value_type.to_text(value)
