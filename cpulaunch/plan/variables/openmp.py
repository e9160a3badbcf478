"""How OpenMP threads wait and which CPUs they are pinned to, in variables of the runtime that will be loaded."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import WorkerCpus
from cpulaunch.plan.placement.threads import first_count
from cpulaunch.plan.variables.resolve import per_worker
from cpulaunch.records.host import Host
from cpulaunch.records.plan import VariableRequest
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest, Origin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal, TypeAlias

Runtime: TypeAlias = 'Literal["intel", "llvm", "gnu"]'
WaitPolicy: TypeAlias = 'Literal["short", "active", "passive"]'


@record
class OpenmpVariables:
    """Requests for variables of the OpenMP runtime, and warnings."""

    variable_requests: tuple[VariableRequest, ...] = ()
    warnings: tuple[str, ...] = ()


def wait_variables(request: LaunchRequest, runtime: Runtime, shared_reason: str | None) -> OpenmpVariables:
    """The variables that say what idle threads do.

    `shared_reason`: why other threads compete for the worker's CPUs; None if none do.
    Source: libgomp manual (OMP_WAIT_POLICY, GOMP_SPINCOUNT); LLVM OpenMP reference (KMP_BLOCKTIME, milliseconds).
    """
    requested, origin = request.settings.wait_policy, request.origin("wait_policy")
    assigned = dict(request.settings.env).get("OMP_WAIT_POLICY")
    users = request.environ.get("OMP_WAIT_POLICY") if assigned is None else assigned
    if users is not None and (origin != "cli" or assigned is not None):
        place = "in your environment" if assigned is None else "(--env)"
        spins = shared_reason and users.lower() == "active"
        warning = f"OMP_WAIT_POLICY={users} {place} makes idle threads spin although {shared_reason}"
        return OpenmpVariables(warnings=(warning,) if spins else ())
    policy = _policy(requested, shared_reason)
    reason = _wait_reason(request, policy, shared_reason)
    refused = requested == "active" and policy != "active" and origin == "cli"
    warning = f"--wait-policy active is not applied: {shared_reason}, so spinning threads would take time from others"
    return OpenmpVariables(
        variable_requests=tuple(
            VariableRequest(name=name, value=value, origin=origin if requested == policy else "default", reason=reason)
            for name, value in _WAIT_VARIABLES[policy].items()
            if not name.startswith(_OTHER_RUNTIME[runtime])
        ),
        warnings=(warning,) if refused else (),
    )


def _policy(requested: str, shared_reason: str | None) -> WaitPolicy:
    if requested == "passive" or shared_reason:
        return "passive"
    return "active" if requested == "active" else "short"


_WAIT_VARIABLES: dict[WaitPolicy, dict[str, str]] = {
    "short": {"KMP_BLOCKTIME": "1"},
    "active": {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "infinite", "GOMP_SPINCOUNT": "INFINITY"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"},
}
_OTHER_RUNTIME: dict[Runtime, str] = {"intel": "GOMP_", "llvm": "GOMP_", "gnu": "KMP_"}
"""What the names of variables begin with that the runtime does not read."""


def _wait_reason(request: LaunchRequest, policy: WaitPolicy, shared_reason: str | None) -> str:
    if request.settings.wait_policy == policy:
        return request.reasons.get("wait_policy", f"--wait-policy {policy}")
    if shared_reason:
        return f"{shared_reason}: idle threads sleep instead of spinning"
    return "idle threads spin for 1 ms after a parallel region (the runtime's default is 200 ms), then sleep"


def affinity_variables(
    request: LaunchRequest, runtime: Runtime, workers: Sequence[WorkerCpus], *, owned: bool, plugin: bool
) -> OpenmpVariables:
    """The variables that pin OpenMP threads to CPUs of their worker.

    `owned`: the workers are bound to CPUs of their own. `plugin`: the worker plugin gives forked children all of the
    worker's CPUs back.
    Source: OpenMP 5.2, 21.1.6 and 21.1.7; LLVM OpenMP reference (KMP_AFFINITY wins over OMP_PROC_BIND).
    """
    affinity, origin = request.settings.affinity, request.origin("affinity")
    users_own = origin != "cli" and any(name in request.environ for name in PINNING)
    if affinity not in ("mask", "none") and not owned:
        return OpenmpVariables(
            warnings=(f"--affinity {affinity} is not applied: workers share CPUs or are not bound to them",)
        )
    if affinity == "mask" or users_own:
        return OpenmpVariables(warnings=() if plugin else _inherited_pinning(request))
    reason = request.reasons.get("affinity", f"--affinity {affinity}: {_affinity_effect(affinity, plugin=plugin)}")
    if affinity == "explicit":
        requests = _explicit(runtime, workers, origin=origin, reason=reason)
    else:
        requests = tuple(
            VariableRequest(name=name, value=value, origin=origin, reason=reason)
            for name, value in _pins(runtime, affinity, request.settings.smt).items()
        )
    named = {each.name for each in requests}
    cleared = tuple(
        VariableRequest(name=name, value=None, origin=origin, reason=f"conflicts with --affinity {affinity}")
        for name in PINNING
        if name in request.environ and name not in named
    )
    return OpenmpVariables(variable_requests=(*requests, *cleared))


def _affinity_effect(affinity: str, *, plugin: bool) -> str:
    if affinity == "none":
        return "threads move freely among the worker's CPUs"
    if plugin:
        return "threads are pinned; the plugin gives forked children all of the worker's CPUs back"
    return "threads are pinned; forked children inherit one thread's CPU"


PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def _pins(runtime: Runtime, affinity: str, smt: bool) -> dict[str, str]:
    if affinity == "none":
        return {"OMP_PROC_BIND": "false"} if runtime == "gnu" else {"KMP_AFFINITY": "none"}
    if runtime == "gnu":
        return {"OMP_PLACES": "threads" if smt else "cores", "OMP_PROC_BIND": affinity}
    return {"KMP_AFFINITY": "granularity=fine," + ("compact,1,0" if affinity == "close" else "scatter")}


def _explicit(
    runtime: Runtime, workers: Sequence[WorkerCpus], *, origin: Origin, reason: str
) -> tuple[VariableRequest, ...]:
    """A place for each CPU, in order. Not GOMP_CPU_AFFINITY: some torch wheels from PyPI run one thread with it.

    Source: OpenMP 5.2, 21.1.6; pytorch issue 149422.
    """
    cpus = [[str(cpu) for core in worker.cores for cpu in core.cpus] for worker in workers]
    if runtime == "gnu":
        places = [",".join(f"{{{id_}}}" for id_ in ids) for ids in cpus]
        return (
            per_worker("OMP_PLACES", places, origin=origin, reason=reason),
            VariableRequest(name="OMP_PROC_BIND", value="close", origin=origin, reason=reason),
        )
    lists = [f"granularity=fine,proclist=[{','.join(ids)}],explicit" for ids in cpus]
    return (per_worker("KMP_AFFINITY", lists, origin=origin, reason=reason),)


_UNPINNED = ("false", "none", "disabled", "respect", "norespect")


def _inherited_pinning(request: LaunchRequest) -> tuple[str, ...]:
    """A warning if the user's own variables pin threads, because a forked DataLoader worker then inherits one CPU.

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
    return (
        f"{', '.join(set_)} pins threads: forked DataLoader workers inherit a single CPU (--affinity none prevents it)",
    )


def hazard_warnings(host: Host, request: LaunchRequest, threads: Sequence[int]) -> tuple[str, ...]:
    """Warnings for variables with which torch computes wrongly, crashes or runs one thread.

    Source: pytorch issues 168965 and 149422 (seen with torch 2.6, not with 2.13).
    """
    profile = {variable.name: variable.value for _, variable in request.profile_env}
    environ = {**profile, **request.environ, **dict(request.settings.env)}
    warnings = []
    if environ.get("OMP_DYNAMIC", "").lower() in ("true", "1", "yes"):
        warnings.append("OMP_DYNAMIC=true can give wrong results: compiled kernels expect a fixed number of threads")
    limit = first_count(environ.get("OMP_THREAD_LIMIT", ""))
    if limit is not None and limit < max(threads):
        warnings.append(f"OMP_THREAD_LIMIT={limit} can give wrong results: a worker has {max(threads)} threads")
    if environ.get("KMP_DUPLICATE_LIB_OK", "").lower() in ("true", "1", "yes"):
        warnings.append(
            "KMP_DUPLICATE_LIB_OK hides two OpenMP runtimes in one process, which can crash or give wrong results"
        )
    version = host.torch_release
    bundled = host.torch is not None and "libgomp" in (host.torch.bundled_openmp or "")
    affinity = environ.get("GOMP_CPU_AFFINITY")
    if affinity and bundled and version is not None and version < (2, 13):
        warnings.append(
            f"GOMP_CPU_AFFINITY={affinity}: with it torch before 2.13 may run a single thread "
            "(use OMP_PLACES and OMP_PROC_BIND instead)"
        )
    return tuple(warnings)
