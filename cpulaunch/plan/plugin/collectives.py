"""Collectives of ranks: their backend, and the variables for oneCCL. Launches without such settings never import this.

A program that itself requests the backend "ccl" needs none of this: the worker's plugin adds oneCCL's defaults.
"""

from __future__ import annotations

from cpulaunch.plan.plugin.ccl_workers import (
    WORKER_VARIABLES,
    CclWorkers,
    ccl_worker_variables,
    check_without_ranks,
    place_ccl_workers,
)
from cpulaunch.plan.plugin.checks import Collectives, TorchChoices
from cpulaunch.plan.variables.resolve import per_worker
from cpulaunch.records.ccl_defaults import DEFAULTS, GLOO_INTERFACE, PATH_VARIABLE, CclDefault, network
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import JobPlan, Note, VariableRequest
from cpulaunch.records.record import record, replace
from cpulaunch.records.request import LaunchRequest, setting_source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.plan.placement.instances import HostWorkers
    from cpulaunch.plan.plugin.timings import CollectiveMeasurement

BACKEND = "dist_backend"


@record(kw_only=False)
class _Backend:
    """The backend that replaces the one the program requests (None: it is not replaced), and the reason."""

    name: str | None
    reason: str


_UNMEASURED = _Backend(None, "auto: not measured on this host yet; the first `cpulaunch run` measures it")


def plan_collectives(
    host: Host,
    request: LaunchRequest,
    workers: HostWorkers,
    choices: TorchChoices,
    *,
    owned: bool,
    measurement: CollectiveMeasurement | None,
) -> Collectives:
    """The backend of collectives, oneCCL's variables and the cores of its threads.

    `owned`: the CPUs of each worker are its own. `measurement` None: collectives are not measured on this host.
    Raises: UsageError if flags contradict each other or this host cannot do what they request.
    """
    unsupported = _ccl_unsupported_reason(host)
    _check(request, unsupported)
    backend = _backend(host, request, workers, obstacle=choices.plugin_missing_reason, measurement=measurement)
    threads = CclWorkers(placement=workers.placement)
    if workers.job is not None:
        idle = unsupported or _idle_reason(request, measurement)
        threads = place_ccl_workers(request, workers.placement, owned=owned, idle=idle)
    uses_ccl = unsupported is None and (backend.name == "ccl" or threads.cpus or request.settings.ccl_path is not None)
    return Collectives(
        placement=threads.placement,
        ccl_cpus=tuple(frozenset(each) for each in threads.cpus),
        choices=choices if backend.name is None else replace(choices, values={**choices.values, BACKEND: backend.name}),
        variable_requests=_variable_requests(request, workers, threads.cpus) if uses_ccl else (),
        notes=(*_backend_notes(request, backend), *threads.notes),
        warnings=_warnings(request, choices),
        unmeasured=backend == _UNMEASURED,
    )


def _backend_notes(request: LaunchRequest, backend: _Backend) -> tuple[Note, ...]:
    if BACKEND not in request.origins:
        return ()
    value = backend.name or "the program's own"
    return (Note(setting=BACKEND, value=value, origin=request.origin(BACKEND), reason=backend.reason),)


def _ccl_unsupported_reason(host: Host) -> str | None:
    """Why this host cannot have the backend ccl; None if it can."""
    return None if host.arch == "x86_64" and host.can_bind else "the backend ccl supports x86-64 Linux only"


def _check(request: LaunchRequest, unsupported: str | None) -> None:
    """Raises: UsageError if flags contradict each other, or need the backend ccl where it is unsupported."""
    settings = request.settings
    flags = {
        "--dist-backend ccl": settings.dist_backend == "ccl" and request.origin(BACKEND) == "cli",
        "--ccl-workers": settings.ccl_workers and request.origin("ccl_workers") == "cli",
        "--ccl-path": request.origin("ccl_path") == "cli",
    }
    if unsupported is not None and any(flags.values()):
        flag = next(flag for flag, given in flags.items() if given)
        raise UsageError(unsupported, value=flag, source="command line", hint="drop it: gloo works on every platform")
    check_without_ranks(request)
    if flags["--ccl-workers"] and settings.dist_backend in ("gloo", "mpi"):
        raise UsageError(
            "oneCCL's threads have nothing to do: no collectives run on oneCCL",
            value=f"--ccl-workers {settings.ccl_workers} with --dist-backend {settings.dist_backend}",
            source=setting_source(request, "ccl_workers"),
            hint="--dist-backend ccl, or drop --ccl-workers",
        )


def _idle_reason(request: LaunchRequest, measurement: CollectiveMeasurement | None) -> str | None:
    """Why oneCCL's threads would have nothing to do; None if they may have."""
    backend = request.settings.dist_backend
    if backend in ("gloo", "mpi"):
        return f"collectives run on {backend}"
    if backend == "auto" and measurement is not None and measurement.backend == "gloo":
        return "gloo was faster here" if measurement.failure is None else measurement.summary
    if request.origin("ccl_workers") == "cli":
        return None
    users = {**request.environ, **dict(request.settings.env)}  # The user's variables win over a profile's threads.
    name = next((name for name in WORKER_VARIABLES if name in users), None)
    return None if name is None else f"you set {name}"


def _warnings(request: LaunchRequest, choices: TorchChoices) -> tuple[str, ...]:
    backend = request.settings.dist_backend
    if choices.plugin_missing_reason is None or backend is None or request.origin(BACKEND) != "cli":
        return ()
    return (f"{choices.plugin_missing_reason}; not applied: --dist-backend {backend}",)


# The backend


def _backend(
    host: Host,
    request: LaunchRequest,
    workers: HostWorkers,
    *,
    obstacle: str | None,
    measurement: CollectiveMeasurement | None,
) -> _Backend:
    """The backend to use. `obstacle`: why no backend can be set in the worker's torch."""
    name = request.settings.dist_backend
    if name is None:
        return _Backend(None, "")
    if obstacle is None and name in ("ccl", "auto"):
        obstacle = _ccl_unsupported_reason(host)
    if obstacle is not None:
        return _Backend(None, f"not applied: {obstacle}")
    if name == "auto":
        return _auto(host, workers, measurement)
    return _Backend(name, "; ".join(filter(None, (request.reasons.get(BACKEND), _BACKEND_REASONS[name]))))


_BACKEND_REASONS = {
    "ccl": "collectives on CPU tensors, where the program requests gloo or no backend",
    "gloo": "also where the program requests ccl",
    "mpi": "torch's own MPI backend, where the program requests gloo or no backend",
}


def _auto(host: Host, workers: HostWorkers, measurement: CollectiveMeasurement | None) -> _Backend:
    job = workers.job
    why = "there are no ranks to start" if job is None else _unmeasurable_reason(host, job, gpus=workers.gpus)
    if why is not None:
        return _Backend(None, f"auto: {why}")
    if measurement is None:
        return _UNMEASURED
    if measurement.failure is not None:
        return _Backend(None, f"auto: {measurement.summary}")
    when = "measured just now" if measurement.fresh else "measured here before"
    if measurement.backend == "ccl":
        return _Backend("ccl", f"auto: {measurement.summary}; {when}")
    return _Backend(None, f"auto: ccl is not faster at every size: {measurement.summary}; {when}")


def _unmeasurable_reason(host: Host, job: JobPlan, *, gpus: tuple[int | None, ...]) -> str | None:
    """Why a measurement on this host would not tell how fast the job's collectives are; None if it would."""
    if host.torch is None:
        return "cannot determine which torch the program uses"
    if job.hosts[1] > 1:
        return "several hosts: a measurement on one does not cover the network, and all ranks must choose alike"
    if job.scheduled_rank is not None:
        return "each rank is a launch of its own, and all ranks must choose alike"
    if any(gpu is not None for gpu in gpus):
        return "the ranks compute on GPUs"
    return "a single rank has no collectives" if job.local_world_size == 1 else None


# Variables for oneCCL


def _variable_requests(
    request: LaunchRequest, workers: HostWorkers, cpus: tuple[tuple[int, ...], ...]
) -> tuple[VariableRequest, ...]:
    """The variables for oneCCL in order of precedence: the first request for a variable counts."""
    path, job = _path(request, workers=bool(cpus)), workers.job
    threads = ccl_worker_variables(request, cpus) if cpus else ()
    if job is None:
        return path
    if request.settings.ccl_path == "memory":  # The backend itself uses the threads' CPUs; oneCCL is not loaded.
        kept = tuple(variable for variable in threads if variable.name != "CCL_WORKER_OFFLOAD")
        return (*path, *kept, *(_local_rank_variables(job) if kept else ()))
    rows = (*DEFAULTS, *_network(request, workers.variable_requests))
    defaults = (VariableRequest(name=row.name, value=row.value, origin="default", reason=row.reason) for row in rows)
    return (*path, *threads, *_local_rank_variables(job), *defaults)


def _network(request: LaunchRequest, planned: tuple[VariableRequest, ...]) -> tuple[CclDefault, ...]:
    """The network interface between hosts: the one gloo uses, also if the user chose that."""
    interface = next((variable.value for variable in planned if variable.name == GLOO_INTERFACE), None)
    return network(request.environ, request.environ.get(GLOO_INTERFACE) or interface or "")


def _path(request: LaunchRequest, *, workers: bool) -> tuple[VariableRequest, ...]:
    """The variable for --ccl-path. oneCCL's threads (`workers`) need the path oneccl unless the user chose another."""
    path = request.settings.ccl_path
    if path is not None:
        reason = request.reasons.get("ccl_path", _PATH_REASONS[path])
        return (VariableRequest(name=PATH_VARIABLE, value=path, origin=request.origin("ccl_path"), reason=reason),)
    if not workers:
        return ()
    reason = "oneCCL's threads only carry out oneCCL's own collectives"
    return (VariableRequest(name=PATH_VARIABLE, value="oneccl", origin=request.origin("ccl_workers"), reason=reason),)


_PATH_REASONS = {
    "auto": "through memory that the ranks share if all are on one host and the kernel permits it, else by oneCCL",
    "memory": "through memory that the ranks share; an error where they cannot share any",
    "oneccl": "by oneCCL, also where ranks could share memory",
}


def _local_rank_variables(job: JobPlan) -> tuple[VariableRequest, ...]:
    """The local rank and local world size for oneCCL, correct even if every rank sees itself as LOCAL_RANK 0."""
    numbers = [str(number) for number in range(job.local_world_size)]
    size = str(job.local_world_size)
    return (
        per_worker("CCL_LOCAL_RANK", numbers, origin="default", reason="the rank's number on this host"),
        VariableRequest(name="CCL_LOCAL_SIZE", value=size, origin="default", reason="ranks on this host"),
    )
