"""Cores for oneCCL's own threads, taken out of the ranks' (--ccl-workers)."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus, worker_cpus
from cpulaunch.plan.placement.regions import last_cores
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.plan import Note, VariableRequest
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest, setting_source

SETTING = "ccl_workers"
WORKER_VARIABLES = ("CCL_WORKER_OFFLOAD", "CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY")
"""What oneCCL is told of its threads; they make sense together only."""


@record
class CclWorkers:
    """What is left to the ranks, and the CPUs of oneCCL's threads, in order, by local rank; none: it has none."""

    placement: Placement
    cpus: tuple[tuple[int, ...], ...] = ()
    notes: tuple[Note, ...] = ()


@record(kw_only=False)
class _Obstacle:
    """Why there can be no such threads: what is wrong, the value seen, and what helps."""

    what: str
    value: str
    hint: str


def check_without_ranks(request: LaunchRequest) -> None:
    """Raises: UsageError if the command line asks for oneCCL's threads and there are no ranks to give them to."""
    if request.settings.ccl_workers and request.origin(SETTING) == "cli" and not request.distributed:
        hint = "--nproc-per-node N starts ranks"
        raise _refused(request, _Obstacle("oneCCL's threads belong to ranks", "no job of ranks", hint))


def place_ccl_workers(request: LaunchRequest, placement: Placement, *, owned: bool, idle: str | None) -> CclWorkers:
    """Cores for oneCCL's threads and what they leave.

    `owned`: the CPUs of a rank are its own. `idle`: why nothing would use such threads.

    Raises: UsageError if the command line asks for what cannot be; a profile only prefers.
    """
    settings = request.settings
    count, siblings = settings.ccl_workers, settings.ccl_worker_siblings
    if not count:
        return CclWorkers(placement=placement, notes=_siblings_alone(request))
    beside = _siblings(placement.workers, count) if siblings else None
    obstacle = _UNOWNED if not owned else _too_small(placement, count, beside)
    if obstacle is not None and request.origin(SETTING) == "cli":
        raise _refused(request, obstacle)
    why = idle or (obstacle and f"{obstacle.what}, {obstacle.value}")
    if why is not None:
        note = Note(setting=SETTING, value="0", origin=request.origin(SETTING), reason=f"not applied: {why}")
        return CclWorkers(placement=placement, notes=(note,))
    taken = tuple(_cores(each, count) for each in placement.workers) if beside is None else beside
    left = placement if siblings else _without(placement, taken)
    return CclWorkers(placement=left, cpus=taken, notes=(_note(request, taken),))


_UNOWNED = _Obstacle(
    "oneCCL's threads need cores that are the ranks' own", "ranks share CPUs or are not bound", "drop --ccl-workers"
)


def _too_small(placement: Placement, count: int, beside: tuple[tuple[int, ...], ...] | None) -> _Obstacle | None:
    if beside is not None:
        free = min(map(len, beside))
        what, hint = "a rank has too few free SMT siblings", "drop --ccl-worker-siblings (or --smt)"
        return None if free == count else _Obstacle(what, f"{free} for {count} of oneCCL's threads", hint)
    cores = min(len(each.cores) for each in placement.workers)
    if cores > count:
        return None
    value = f"{cores} core{'s' * (cores != 1)} of a rank, {count} for oneCCL"
    hint = f"--ccl-workers {cores - 1}" if cores > 1 else "fewer ranks, or --ccl-worker-siblings"
    return _Obstacle("a rank would have no core left to compute on", value, hint)


def _refused(request: LaunchRequest, obstacle: _Obstacle) -> UsageError:
    flag = f"--ccl-workers {request.settings.ccl_workers}"
    source = f"{flag}, {setting_source(request, SETTING)}"
    return UsageError(obstacle.what, value=obstacle.value, source=source, hint=obstacle.hint)


def _siblings_alone(request: LaunchRequest) -> tuple[Note, ...]:
    """Raises: UsageError if SMT siblings are asked for and no threads to run there."""
    name = "ccl_worker_siblings"
    if request.settings.ccl_worker_siblings and request.origin(name) == "cli":
        raise UsageError(
            "no threads of oneCCL's to give SMT siblings to",
            value="--ccl-worker-siblings alone",
            source="command line",
            hint="--ccl-workers N --ccl-worker-siblings",
        )
    return ()


def _cores(whole: WorkerCpus, count: int) -> tuple[int, ...]:
    """The first CPUs of so many of a rank's cores."""
    return tuple(sorted(core.cpus[0] for core in last_cores(whole.cores, count)))


def _siblings(workers: tuple[WorkerCpus, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """For each rank so many CPUs beside its own, on its last cores, that are nobody's; fewer if there are no more."""
    taken = {cpu for each in workers for cpu in each.cpus}
    found: dict[frozenset[int], tuple[int, ...]] = {}
    for each in workers:
        if each.cpus in found:  # A scheduler bound each rank to CPUs of its own, and these are this rank's.
            continue
        free = [cpu for core in each.cores for cpu in core.allowed if cpu not in taken]
        found[each.cpus] = tuple(free[-count:])
        taken.update(found[each.cpus])
    return tuple(found[each.cpus] for each in workers)


def _without(placement: Placement, taken: tuple[tuple[int, ...], ...]) -> Placement:
    workers = tuple(
        worker_cpus(core for core in whole.cores if core.cpus[0] not in gone)
        for whole, gone in zip(placement.workers, taken, strict=True)
    )
    return Placement(
        workers=workers, exclusive=placement.exclusive, reason=placement.reason, warnings=placement.warnings
    )


def _note(request: LaunchRequest, taken: tuple[tuple[int, ...], ...]) -> Note:
    cpus = format_cpulist(frozenset(cpu for each in taken for cpu in each))
    where = "siblings of the ranks' CPUs" if request.settings.ccl_worker_siblings else "taken out of the ranks' cores"
    reason = f"CPUs {cpus}, {where}: oneCCL's threads run there, and no compute thread"
    said = request.reasons.get(SETTING, "")
    return Note(
        setting=SETTING,
        value=str(request.settings.ccl_workers),
        origin=request.origin(SETTING),
        reason="; ".join(filter(None, (said, reason))),
    )


def ccl_worker_variables(request: LaunchRequest, cpus: tuple[tuple[int, ...], ...]) -> tuple[VariableRequest, ...]:
    """The variables that give oneCCL these CPUs.

    Source: oneCCL, environment variables: the list has the threads of all local ranks, one rank after the other.
    """
    origin = request.origin(SETTING)
    offload = "oneCCL's own threads move the data while the ranks compute"
    places = ",".join(str(cpu) for each in cpus for cpu in each)
    return (
        VariableRequest(name="CCL_WORKER_OFFLOAD", value="1", origin=origin, reason=offload),
        VariableRequest(name="CCL_WORKER_COUNT", value=str(len(cpus[0])), origin=origin, reason="threads of each rank"),
        VariableRequest(
            name="CCL_WORKER_AFFINITY", value=places, origin=origin, reason="their CPUs, local rank by local rank"
        ),
    )
