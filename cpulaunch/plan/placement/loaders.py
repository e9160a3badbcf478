"""DataLoader workers: how many each instance gets, and which of its cores are reserved for them."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus, worker_cpus
from cpulaunch.plan.placement.memory import memory_budget
from cpulaunch.plan.placement.regions import last_cores
from cpulaunch.records.cpulist import cpus_are
from cpulaunch.records.host import Host, count_text, size_text
from cpulaunch.records.plan import Note
from cpulaunch.records.record import record, replace
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.plan.placement.pool import Pool

MIN_CORES = 4
"""An instance with fewer cores reserves none: one core would be a third or more of its compute."""
MAX_AUTO = 8
LOADER_BYTES = 300 << 20
"""Memory to allow for one DataLoader worker: a Python with torch, forked or started anew, and two batches ahead."""
MEMORY_DIVISOR = 4
"""DataLoader workers should fill at most one part in this many of the memory: the rest is for the program."""


@record
class Loaders:
    """DataLoader workers of each instance (None: as many as the program sets), and the CPUs left to compute on.

    `cpus`: the CPUs reserved for them, by instance. `sharing`: how many of an instance's DataLoader workers take from
    its compute time, because they have no cores of their own or because a quota counts them too.
    """

    dataloader_workers: int | None
    placement: Placement
    cpus: tuple[frozenset[int], ...]
    sharing: int = 0
    notes: tuple[Note, ...] = ()
    warnings: tuple[str, ...] = ()


def plan_loaders(
    host: Host,
    request: LaunchRequest,
    pool: Pool,
    placement: Placement,
    *,
    owned: bool,
    plugin_missing_reason: str | None,
) -> Loaders:
    """The DataLoader workers that the request asks for, and the cores reserved for them.

    `owned`: the CPUs of an instance are its own. `plugin_missing_reason`: why there is no plugin to start DataLoader
    workers (None: there is one); then no cores are reserved.
    """
    requested = request.settings.dataloader_workers
    if requested is None:
        return _without_loaders(placement)
    if plugin_missing_reason is not None:
        return _without_loaders(placement, _note(request, None, f"not applied: {plugin_missing_reason}"))
    workers = _auto(host, pool, placement) if requested == "auto" else requested
    if workers is None:
        why = f"an instance has fewer than {MIN_CORES} cores, or memory is short"
        return _without_loaders(placement, _note(request, None, why))
    divided = [_reserve(each, workers) if owned else (each, frozenset[int]()) for each in placement.workers]
    reason = _reason([cpus for _, cpus in divided]) if owned else _NOT_OWNED
    return Loaders(
        dataloader_workers=workers,
        placement=replace(placement, workers=tuple(compute for compute, _ in divided)),
        cpus=tuple(cpus for _, cpus in divided),
        sharing=0 if owned and pool.quota_threads is None else workers,
        notes=(_note(request, workers, reason),),
        warnings=_memory_warnings(host, workers, len(placement.workers)),
    )


_NOT_OWNED = "compute threads leave CPU time for them, because instances have no CPUs of their own to reserve"


def _without_loaders(placement: Placement, *notes: Note) -> Loaders:
    cpus = (frozenset[int](),) * len(placement.workers)
    return Loaders(dataloader_workers=None, placement=placement, cpus=cpus, notes=notes)


def _note(request: LaunchRequest, workers: int | None, reason: str) -> Note:
    name = "dataloader_workers"
    value = "the program's own" if workers is None else str(workers)
    why = "; ".join(filter(None, (request.reasons.get(name, ""), reason)))
    return Note(setting=name, value=value, origin=request.origin(name), reason=why)


def _reason(reserved: Sequence[frozenset[int]]) -> str:
    if not any(reserved):
        return f"they share the instance's cores, which are fewer than {MIN_CORES}"
    some = "" if all(reserved) else f"; an instance of fewer than {MIN_CORES} cores shares its cores with them"
    return f"{cpus_are(frozenset().union(*reserved))} reserved for them: no compute thread runs there{some}"


def _auto(host: Host, pool: Pool, placement: Placement) -> int | None:
    """A quarter of the smallest instance's cores, as far as memory allows; None: as many as the program sets."""
    cores = min(min(each.cpu_limit, len(each.cores)) for each in placement.workers)
    if pool.quota_threads is not None:
        cores = min(cores, pool.quota_threads // len(placement.workers))
    if cores < MIN_CORES:
        return None
    workers = min(max(1, cores // 4), MAX_AUTO)
    budget = memory_budget(host)
    if budget is not None:
        workers = min(workers, budget // MEMORY_DIVISOR // (LOADER_BYTES * len(placement.workers)))
    return workers or None


def _memory_warnings(host: Host, workers: int, instances: int) -> tuple[str, ...]:
    budget = memory_budget(host)
    need = workers * instances * LOADER_BYTES
    if budget is None or need * MEMORY_DIVISOR <= budget:
        return ()
    return (
        f"{count_text(workers * instances, 'DataLoader worker')} may use {size_text(need)} "
        f"({size_text(LOADER_BYTES)} each), more than a quarter of the {size_text(budget)} available "
        "(--dataloader-workers auto chooses fewer)",
    )


def _reserve(worker: WorkerCpus, count: int) -> tuple[WorkerCpus, frozenset[int]]:
    """What remains of an instance to compute on, and the CPUs reserved for its `count` DataLoader workers."""
    if len(worker.cores) < MIN_CORES:
        return worker, frozenset()
    reserved = last_cores(worker.cores, min(count, len(worker.cores) // 2))
    rest = worker_cpus(core for core in worker.cores if core not in reserved)
    return rest, frozenset(cpu for core in reserved for cpu in core.cpus)
