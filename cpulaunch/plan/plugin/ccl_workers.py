"""Cores for oneCCL's own threads, taken from those of the ranks (--ccl-workers)."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus, worker_cpus
from cpulaunch.plan.placement.regions import last_cores
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import count_text
from cpulaunch.records.plan import Note, VariableRequest
from cpulaunch.records.record import record, replace
from cpulaunch.records.request import LaunchRequest, setting_source

SETTING = "ccl_workers"
WORKER_VARIABLES = ("CCL_WORKER_OFFLOAD", "CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY")
"""oneCCL's variables for its threads; they only make sense together."""


@record
class CclWorkers:
    """The CPUs left to the ranks, and those of oneCCL's threads in order, by local rank (empty: no threads)."""

    placement: Placement
    cpus: tuple[tuple[int, ...], ...] = ()
    notes: tuple[Note, ...] = ()


@record(kw_only=False)
class _Obstacle:
    """Why oneCCL cannot have threads of its own: the problem, the value seen, and a hint."""

    problem: str
    value: str
    hint: str


def check_without_ranks(request: LaunchRequest) -> None:
    """Raises: UsageError if the command line requests threads for oneCCL and the launch starts no ranks."""
    if request.settings.ccl_workers and request.origin(SETTING) == "cli" and not request.distributed:
        hint = "--nproc-per-node N starts ranks"
        raise _error(request, _Obstacle("--ccl-workers needs ranks", "no job of ranks", hint))


def place_ccl_workers(request: LaunchRequest, placement: Placement, *, owned: bool, idle: str | None) -> CclWorkers:
    """Cores for oneCCL's threads and the CPUs left to the ranks.

    `owned`: the CPUs of each rank are its own. `idle`: why the threads would have nothing to do.

    Raises: UsageError if the command line requests threads that cannot have cores of their own. Threads that only a
    profile requests are left out instead, with a note.
    """
    settings = request.settings
    count = settings.ccl_workers
    if not count:
        _check_siblings(request)
        return CclWorkers(placement=placement)
    siblings = _free_siblings(placement.workers, count) if settings.ccl_worker_siblings else None
    obstacle = _too_few(placement, count, siblings) if owned else _SHARED
    if obstacle is not None and request.origin(SETTING) == "cli":
        raise _error(request, obstacle)
    why = idle or (obstacle and f"{obstacle.problem}: {obstacle.value}")
    if why is not None:
        note = Note(setting=SETTING, value="0", origin=request.origin(SETTING), reason=f"not applied: {why}")
        return CclWorkers(placement=placement, notes=(note,))
    if siblings is not None:
        return CclWorkers(placement=placement, cpus=siblings, notes=(_note(request, siblings),))
    taken = tuple(_last_cpus(worker, count) for worker in placement.workers)
    return CclWorkers(placement=_without(placement, taken), cpus=taken, notes=(_note(request, taken),))


_SHARED = _Obstacle(
    "--ccl-workers needs ranks with cores of their own", "the ranks share CPUs or are not bound", "drop --ccl-workers"
)


def _too_few(placement: Placement, count: int, siblings: tuple[tuple[int, ...], ...] | None) -> _Obstacle | None:
    """The obstacle if a rank has fewer than `count` free SMT siblings, or no core left to compute on; None if none."""
    if siblings is not None:
        free = min(map(len, siblings))
        problem, hint = "a rank has too few free SMT siblings", "drop --ccl-worker-siblings (or --smt)"
        return (
            None if free == count else _Obstacle(problem, f"{free} for {count_text(count, 'thread')} of oneCCL", hint)
        )
    cores = min(len(each.cores) for each in placement.workers)
    if cores > count:
        return None
    value = f"{count} for oneCCL, of {count_text(cores, 'core')}"
    hint = f"--ccl-workers {cores - 1}" if cores > 1 else "start fewer ranks, or add --ccl-worker-siblings"
    return _Obstacle("a rank would have no core left to compute on", value, hint)


def _error(request: LaunchRequest, obstacle: _Obstacle) -> UsageError:
    flag = f"--ccl-workers {request.settings.ccl_workers}"
    source = f"{flag}, {setting_source(request, SETTING)}"
    return UsageError(obstacle.problem, value=obstacle.value, source=source, hint=obstacle.hint)


def _check_siblings(request: LaunchRequest) -> None:
    """Raises: UsageError if the command line has --ccl-worker-siblings without --ccl-workers."""
    name = "ccl_worker_siblings"
    if request.settings.ccl_worker_siblings and request.origin(name) == "cli":
        raise UsageError(
            "--ccl-worker-siblings needs --ccl-workers",
            source="command line",
            hint="--ccl-workers N --ccl-worker-siblings",
        )


def _last_cpus(worker: WorkerCpus, count: int) -> tuple[int, ...]:
    """The first CPU of each of the worker's last `count` cores."""
    return tuple(sorted(core.cpus[0] for core in last_cores(worker.cores, count)))


def _free_siblings(workers: tuple[WorkerCpus, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """For each worker, `count` CPUs on its last cores that no worker uses; fewer if there are no more."""
    taken = {cpu for worker in workers for cpu in worker.cpus}
    found: dict[frozenset[int], tuple[int, ...]] = {}
    for worker in workers:
        if worker.cpus in found:  # A scheduler bound this rank to CPUs of its own, which stand for every rank's here.
            continue
        free = [cpu for core in worker.cores for cpu in core.allowed if cpu not in taken]
        found[worker.cpus] = tuple(free[-count:])
        taken.update(found[worker.cpus])
    return tuple(found[worker.cpus] for worker in workers)


def _without(placement: Placement, taken: tuple[tuple[int, ...], ...]) -> Placement:
    """The placement without the cores whose first CPU is taken from a worker."""
    workers = tuple(
        worker_cpus(core for core in worker.cores if core.cpus[0] not in cpus)
        for worker, cpus in zip(placement.workers, taken, strict=True)
    )
    return replace(placement, workers=workers)


def _note(request: LaunchRequest, taken: tuple[tuple[int, ...], ...]) -> Note:
    cpus = format_cpulist(frozenset(cpu for each in taken for cpu in each))
    where = "SMT siblings of the ranks' CPUs" if request.settings.ccl_worker_siblings else "from the ranks' cores"
    reason = f"CPUs {cpus} are reserved for oneCCL's threads, {where}; no compute threads run there"
    return Note(
        setting=SETTING,
        value=str(request.settings.ccl_workers),
        origin=request.origin(SETTING),
        reason="; ".join(filter(None, (request.reasons.get(SETTING), reason))),
    )


def ccl_worker_variables(request: LaunchRequest, cpus: tuple[tuple[int, ...], ...]) -> tuple[VariableRequest, ...]:
    """The variables that give oneCCL these CPUs.

    Source: oneCCL, environment variables: the affinity lists the CPUs of all local ranks, one rank after the other.
    """
    origin = request.origin(SETTING)
    offload = "oneCCL's own threads move the data while the ranks compute"
    affinity = ",".join(str(cpu) for each in cpus for cpu in each)
    return (
        VariableRequest(name="CCL_WORKER_OFFLOAD", value="1", origin=origin, reason=offload),
        VariableRequest(
            name="CCL_WORKER_COUNT", value=str(len(cpus[0])), origin=origin, reason="oneCCL's threads of each rank"
        ),
        VariableRequest(
            name="CCL_WORKER_AFFINITY", value=affinity, origin=origin, reason="CPUs of oneCCL's threads, by local rank"
        ),
    )
