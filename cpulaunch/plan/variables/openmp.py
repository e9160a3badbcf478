"""How OpenMP threads wait and where they sit, in the words of the runtime that will be loaded."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import WorkerCpus
from cpulaunch.plan.placement.threads import first_count
from cpulaunch.plan.variables.resolve import VariableRequest, per_worker
from cpulaunch.records.host import Host
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal, TypeAlias

Runtime: TypeAlias = 'Literal["intel", "llvm", "gnu"]'
Waiting: TypeAlias = 'Literal["short", "active", "passive"]'


@record(kw_only=False)
class Tuning:
    """Variables for the OpenMP runtime, and what to warn of."""

    variable_requests: tuple[VariableRequest, ...]
    warnings: tuple[str, ...] = ()


def waiting(request: LaunchRequest, runtime: Runtime, shared: str | None) -> Tuning:
    """What idle threads do. `shared`: why the worker's CPUs are not its own; None if they are.

    Source: libgomp manual (OMP_WAIT_POLICY, GOMP_SPINCOUNT); LLVM OpenMP reference (KMP_BLOCKTIME, milliseconds).
    """
    asked, origin = request.settings.wait_policy, request.origin("wait_policy")
    assigned = dict(request.settings.env).get("OMP_WAIT_POLICY")
    users = request.environ.get("OMP_WAIT_POLICY") if assigned is None else assigned
    if users is not None and (origin != "cli" or assigned is not None):
        place = "in your environment" if assigned is None else "(--env)"
        spins = shared and users.lower() == "active"
        return Tuning((), (f"OMP_WAIT_POLICY={users} {place} spins although {shared}",) if spins else ())
    policy = _policy(asked, shared)
    refused = asked == "active" and policy != "active"
    reason = _wait_reason(request, policy, shared)
    variable_requests = tuple(
        VariableRequest(name=name, value=value, origin=origin if asked == policy else "default", reason=reason)
        for name, value in _WAITING[policy].items()
        if not name.startswith(_FOREIGN[runtime])
    )
    if refused and origin == "cli":
        return Tuning(
            variable_requests, (f"--wait-policy active is not applied: {shared}, and spinning threads would starve",)
        )
    return Tuning(variable_requests)


def _policy(asked: str, shared: str | None) -> Waiting:
    if asked == "passive" or shared:
        return "passive"
    return "active" if asked == "active" else "short"


_WAITING: dict[Waiting, dict[str, str]] = {
    "short": {"KMP_BLOCKTIME": "1"},
    "active": {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "infinite", "GOMP_SPINCOUNT": "INFINITY"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"},
}
_FOREIGN: dict[Runtime, str] = {"intel": "GOMP_", "llvm": "GOMP_", "gnu": "KMP_"}
"""Variables of the runtimes that are not loaded."""


def _wait_reason(request: LaunchRequest, policy: Waiting, shared: str | None) -> str:
    if request.settings.wait_policy == policy:
        return request.reasons.get("wait_policy", f"--wait-policy {policy}")
    if shared:
        return f"{shared}: idle threads sleep instead of spinning"
    return "spin for 1 ms after a parallel region (the runtime's default is 200), then sleep"


def pinning(
    request: LaunchRequest, runtime: Runtime, workers: Sequence[WorkerCpus], *, bound: bool, guarded: bool
) -> Tuning:
    """Where OpenMP threads sit inside the worker's CPUs. `guarded`: the worker plugin gives children all of them.

    Source: OpenMP 5.2, 21.1.6 and 21.1.7; LLVM OpenMP reference (KMP_AFFINITY wins over OMP_PROC_BIND).
    """
    affinity = request.settings.affinity
    if affinity == "mask":
        return Tuning(variable_requests=(), warnings=() if guarded else _inherited_pinning(request))
    if affinity != "none" and not bound:
        return Tuning(
            variable_requests=(),
            warnings=(f"--affinity {affinity} is not applied: the workers are not bound to CPUs of their own",),
        )
    origin = request.origin("affinity")
    if origin != "cli" and any(name in request.environ for name in PINNING):
        return Tuning((), () if guarded else _inherited_pinning(request))
    children = "get the worker's CPUs back from the plugin" if guarded else "inherit one thread's CPU"
    reason = request.reasons.get("affinity", f"--affinity {affinity}; forked children {children}")
    if affinity == "none":
        reason = request.reasons.get("affinity", "--affinity none: threads move freely inside the worker's CPUs")
    if affinity == "explicit":
        name, values = _explicit(runtime, workers)
        variable_requests = [per_worker(name, values, origin=origin, reason=reason)]
        if name == "OMP_PLACES":
            variable_requests.append(VariableRequest(name="OMP_PROC_BIND", value="close", origin=origin, reason=reason))
    else:
        variable_requests = [
            VariableRequest(name=name, value=value, origin=origin, reason=reason)
            for name, value in _pins(runtime, affinity, request.settings.smt).items()
        ]
    named = {variable.name for variable in variable_requests}
    cleared = [
        VariableRequest(name=name, value=None, origin=origin, reason=f"would contradict --affinity {affinity}")
        for name in PINNING
        if name in request.environ and name not in named
    ]
    return Tuning(variable_requests=(*variable_requests, *cleared))


PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def _pins(runtime: Runtime, affinity: str, smt: bool) -> dict[str, str]:
    if affinity == "none":
        return {"OMP_PROC_BIND": "false"} if runtime == "gnu" else {"KMP_AFFINITY": "none"}
    if runtime == "gnu":
        return {"OMP_PLACES": "threads" if smt else "cores", "OMP_PROC_BIND": affinity}
    return {"KMP_AFFINITY": "granularity=fine," + ("compact,1,0" if affinity == "close" else "scatter")}


def _explicit(runtime: Runtime, workers: Sequence[WorkerCpus]) -> tuple[str, list[str]]:
    """A place for each CPU, in order. Not GOMP_CPU_AFFINITY: with it some pip torch runs one thread.

    Source: OpenMP 5.2, 21.1.6; pytorch issue 149422.
    """
    cpus = [[str(cpu) for core in worker.cores for cpu in core.cpus] for worker in workers]
    if runtime == "gnu":
        return "OMP_PLACES", [",".join(f"{{{id_}}}" for id_ in ids) for ids in cpus]
    return "KMP_AFFINITY", [f"granularity=fine,proclist=[{','.join(ids)}],explicit" for ids in cpus]


_UNPINNED = ("false", "none", "disabled", "respect", "norespect")


def _inherited_pinning(request: LaunchRequest) -> tuple[str, ...]:
    """A warning if the user's own variables pin threads: a forked DataLoader worker inherits one CPU.

    Source: pytorch issues 99625 and 101850.
    """
    environ = {**request.environ, **dict(request.settings.env)}
    set_ = [
        f"{name}={environ[name]}"
        for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
        if environ.get(name) and environ[name].lower() not in _UNPINNED
    ]
    if not set_:
        return ()
    return (f"{', '.join(set_)} pins threads: forked DataLoader workers would inherit one CPU (--affinity none)",)


def hazards(host: Host, request: LaunchRequest, threads: Sequence[int]) -> tuple[str, ...]:
    """Warnings for variables with which torch computes wrongly, crashes or runs one thread.

    Source: pytorch issues 168965 and 149422 (seen with torch 2.6, not with 2.13).
    """
    profile = {variable.name: variable.value for _, variable in request.profile_env}
    environ = {**profile, **request.environ, **dict(request.settings.env)}
    warnings = []
    if environ.get("OMP_DYNAMIC", "").lower() in ("true", "1", "yes"):
        warnings.append("OMP_DYNAMIC=true may start fewer threads than torch was compiled for: wrong results")
    limit = first_count(environ.get("OMP_THREAD_LIMIT", ""))
    if limit is not None and limit < max(threads):
        warnings.append(f"OMP_THREAD_LIMIT={limit} is below the {max(threads)} threads of a worker: wrong results")
    if environ.get("KMP_DUPLICATE_LIB_OK", "").lower() in ("true", "1", "yes"):
        warnings.append("KMP_DUPLICATE_LIB_OK lets two OpenMP runtimes run in one process: crashes, wrong results")
    version = host.torch_release
    bundled = host.torch is not None and "libgomp" in (host.torch.bundled_openmp or "")
    affinity = environ.get("GOMP_CPU_AFFINITY")
    if affinity and bundled and version is not None and version < (2, 13):
        warnings.append(
            f"GOMP_CPU_AFFINITY={affinity}: torch before 2.13 may run one thread with it (OMP_PLACES and OMP_PROC_BIND)"
        )
    return tuple(warnings)
