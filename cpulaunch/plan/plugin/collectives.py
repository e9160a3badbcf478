"""Collectives of ranks: which backend they run on, and what oneCCL is told. Launches that ask for neither skip this.

A program that asks for "ccl" by itself needs nothing of it: the worker's plugin adds oneCCL's defaults.
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
from cpulaunch.records.ccl_defaults import DEFAULTS, GLOO_INTERFACE, PATH_VARIABLE, Default, network, transport
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import JobPlan, Note, VariableRequest
from cpulaunch.records.record import record, replace
from cpulaunch.records.request import LaunchRequest, SchedulerRank, setting_source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.plan.placement.instances import HostWorkers
    from cpulaunch.plan.plugin.timings import CollectiveMeasurement

BACKEND = "dist_backend"


@record(kw_only=False)
class _Backend:
    """The backend that replaces the program's own ("": none does), the plan's word for that, and why."""

    name: str
    shown: str
    reason: str


_UNMEASURED = _Backend("", "the program's own", "auto: not measured on this host yet, `run` measures once")


def plan_collectives(
    host: Host,
    request: LaunchRequest,
    workers: HostWorkers,
    choices: TorchChoices,
    *,
    owned: bool,
    measurement: CollectiveMeasurement | None,
) -> Collectives:
    """What the settings on collectives come to.

    Raises: UsageError if the command line asks for what contradicts itself or cannot be here.
    """
    foreign = _foreign(host)
    _check(request, foreign)
    backend = _backend(
        host,
        request,
        workers=workers,
        plugin_missing_reason=choices.plugin_missing_reason,
        foreign=foreign,
        measurement=measurement,
    )
    threads = CclWorkers(placement=workers.placement)
    if workers.job is not None:
        idle = foreign or _idle(request, measurement)
        threads = place_ccl_workers(request, workers.placement, owned=owned, idle=idle)
    told = foreign is None and (backend.name == "ccl" or threads.cpus or request.settings.ccl_path is not None)
    note = Note(setting=BACKEND, value=backend.shown, origin=request.origin(BACKEND), reason=backend.reason)
    return Collectives(
        placement=threads.placement,
        cpus=tuple(frozenset(each) for each in threads.cpus),
        choices=_with_backend(choices, backend.name),
        variable_requests=_variable_requests(request, workers, threads.cpus) if told else (),
        notes=(*((note,) if BACKEND in request.origins else ()), *threads.notes),
        warnings=_warnings(request, choices),
        unmeasured=backend == _UNMEASURED,
    )


def _foreign(host: Host) -> str | None:
    """Why this host cannot have the backend ccl; None if it can."""
    return None if host.arch == "x86_64" and host.can_bind else "the backend ccl is for x86-64 Linux"


def _check(request: LaunchRequest, foreign: str | None) -> None:
    """Raises: UsageError for options that cannot be meant together, or not on this host."""
    settings = request.settings
    asked = {
        "--dist-backend ccl": settings.dist_backend == "ccl" and request.origin(BACKEND) == "cli",
        "--ccl-workers": settings.ccl_workers and request.origin("ccl_workers") == "cli",
        "--ccl-path": request.origin("ccl_path") == "cli",
    }
    if foreign is not None and any(asked.values()):
        flag = next(flag for flag, chosen in asked.items() if chosen)
        raise UsageError(foreign, value=flag, source="command line", hint="drop it: gloo is everywhere")
    check_without_ranks(request)
    if settings.ccl_workers and settings.dist_backend in ("gloo", "mpi") and request.origin("ccl_workers") == "cli":
        raise UsageError(
            "oneCCL's threads, and nothing that runs on oneCCL",
            value=f"--ccl-workers {settings.ccl_workers} with --dist-backend {settings.dist_backend}",
            source=setting_source(request, "ccl_workers"),
            hint="--dist-backend ccl, or drop --ccl-workers",
        )


def _idle(request: LaunchRequest, measurement: CollectiveMeasurement | None) -> str | None:
    """Why nothing would run on oneCCL's threads; None if something may."""
    backend = request.settings.dist_backend
    if backend in ("gloo", "mpi"):
        return f"collectives run on {backend}"
    if backend == "auto" and measurement is not None and measurement.backend == "gloo":
        return "gloo was faster here" if measurement.failure is None else measurement.summary
    return _users_own(request)


def _users_own(request: LaunchRequest) -> str | None:
    """What to say where a profile wants such threads, and the user has decided on them by variables; else None."""
    users = {**request.environ, **dict(request.settings.env)}
    name = next((name for name in WORKER_VARIABLES if name in users), None)
    return None if name is None or request.origin("ccl_workers") == "cli" else f"you set {name}"


def _with_backend(choices: TorchChoices, backend: str) -> TorchChoices:
    if not backend:
        return choices
    return replace(choices, values={**choices.values, BACKEND: backend})


def _warnings(request: LaunchRequest, choices: TorchChoices) -> tuple[str, ...]:
    asked = request.settings.dist_backend
    if choices.plugin_missing_reason is None or asked is None or request.origin(BACKEND) != "cli":
        return ()
    return (f"{choices.plugin_missing_reason}; not applied: --dist-backend {asked}",)


# Which backend


def _backend(
    host: Host,
    request: LaunchRequest,
    *,
    workers: HostWorkers,
    plugin_missing_reason: str | None,
    foreign: str | None,
    measurement: CollectiveMeasurement | None,
) -> _Backend:
    asked = request.settings.dist_backend
    if asked is None:
        return _Backend("", "the program's own", "")
    obstacle = plugin_missing_reason or (foreign if asked in ("ccl", "auto") else None)
    if obstacle is not None:
        return _Backend("", "the program's own", f"not applied: {obstacle}")
    said = request.reasons.get(BACKEND, "")
    if asked == "auto":
        return _auto(host, workers, measurement)
    return _Backend(asked, asked, "; ".join(filter(None, (said, _MEANINGS[asked]))))


_MEANINGS = {
    "ccl": "collectives on CPU tensors, where the program asks for gloo or for nothing",
    "gloo": "also where the program asks for ccl",
    "mpi": "torch's own MPI backend, where the program asks for gloo or for nothing",
}


def _auto(host: Host, workers: HostWorkers, measurement: CollectiveMeasurement | None) -> _Backend:
    job = workers.job
    why = "there are no ranks to start" if job is None else _unmeasurable(host, job, gpus=workers.gpus)
    if why is not None:
        return _Backend("", "the program's own", f"auto: {why}")
    if measurement is None:
        return _UNMEASURED
    when = "measured just now" if measurement.fresh else "measured here before"
    if measurement.failure is not None:
        return _Backend("", "the program's own", f"auto: {measurement.summary}")
    if measurement.backend == "ccl":
        return _Backend("ccl", "ccl", f"auto: {measurement.summary}; {when}")
    return _Backend("", "the program's own", f"auto: ccl is not faster at every size: {measurement.summary}; {when}")


def _unmeasurable(host: Host, job: JobPlan, *, gpus: tuple[int | None, ...]) -> str | None:
    """Why a measurement on this host would say nothing of the job's collectives; None if it would."""
    if host.torch is None:
        return "which torch the program uses, if any, is not known"
    if job.hosts[1] > 1:
        return "several hosts: what this one measures says nothing of the network, and all ranks must choose alike"
    if job.scheduled_rank is not None:
        return "each rank is a launch of its own, and all must choose alike"
    if any(gpu is not None for gpu in gpus):
        return "the ranks compute on GPUs"
    return "one rank has nobody to talk to" if job.local_world_size == 1 else None


# What oneCCL is told


def _variable_requests(
    request: LaunchRequest, workers: HostWorkers, cpus: tuple[tuple[int, ...], ...]
) -> tuple[VariableRequest, ...]:
    """The best first: the first request for a variable counts."""
    path, job = _path(request, workers=bool(cpus)), workers.job
    threads = ccl_worker_variables(request, cpus) if cpus else ()
    if job is None:
        return path
    if request.settings.ccl_path == "memory":  # Then oneCCL is not even loaded; the threads' CPUs are the backend's.
        kept = tuple(variable for variable in threads if variable.name != "CCL_WORKER_OFFLOAD")
        return (*path, *kept, *(_places(job) if kept else ()))
    rows = (*DEFAULTS, *_between_hosts(request, job.scheduled_rank, workers.variable_requests))
    defaults = (VariableRequest(name=row.name, value=row.value, origin="default", reason=row.reason) for row in rows)
    return (*path, *threads, *_places(job), *defaults)


def _between_hosts(
    request: LaunchRequest, rank: SchedulerRank | None, planned: tuple[VariableRequest, ...]
) -> tuple[Default, ...]:
    """What carries data between hosts, and over which interface: gloo's, be it the user's choice."""
    environ = request.environ
    place = ("", "") if rank is None else (str(rank.rank), str(rank.world_size))
    rows = transport(environ, rank=place[0], world_size=place[1])
    interface = next((variable.value for variable in planned if variable.name == GLOO_INTERFACE), None)
    return (*rows, *network(environ, rows, environ.get(GLOO_INTERFACE) or interface or ""))


def _path(request: LaunchRequest, *, workers: bool) -> tuple[VariableRequest, ...]:
    asked = request.settings.ccl_path
    if asked is not None:
        reason = request.reasons.get("ccl_path", _PATHS[asked])
        return (VariableRequest(name=PATH_VARIABLE, value=asked, origin=request.origin("ccl_path"), reason=reason),)
    if not workers:
        return ()
    reason = "oneCCL's threads carry out oneCCL's own collectives only"
    return (VariableRequest(name=PATH_VARIABLE, value="oneccl", origin=request.origin("ccl_workers"), reason=reason),)


_PATHS = {
    "auto": "through the ranks' own memory if all are on one host and the kernel lets them, else by oneCCL",
    "memory": "ranks read and write one another's memory; an error where they cannot",
    "oneccl": "by oneCCL, also where ranks could read one another's memory",
}


def _places(job: JobPlan) -> tuple[VariableRequest, ...]:
    """Which rank of the host each is: also where all believe to be LOCAL_RANK 0."""
    numbers = [str(number) for number in range(job.local_world_size)]
    return (
        per_worker("CCL_LOCAL_RANK", numbers, origin="default", reason="which of the host's ranks it is"),
        VariableRequest(
            name="CCL_LOCAL_SIZE", value=str(job.local_world_size), origin="default", reason="ranks of this host"
        ),
    )
