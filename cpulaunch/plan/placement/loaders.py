"""DataLoader workers: how many each instance gets, and which of its cores are theirs alone."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import Placement, WorkerCpus, worker_cpus
from cpulaunch.plan.placement.memory import memory_budget
from cpulaunch.plan.placement.regions import last_cores
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import Host, size_text
from cpulaunch.records.plan import Note
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.plan.placement.pool import Pool

FEWEST_CORES = 4
"""Of an instance with fewer, a core for loading would be a third or more of its computing."""
MOST_AUTO = 8
LOADER_BYTES = 300 << 20
"""Memory to allow for one DataLoader worker: a Python with torch forked or started anew, and two batches ahead."""
MEMORY_PART = 4
"""Loader workers should fill at most one part in this many of the memory: the rest is the program's."""


@record
class Loaders:
    """DataLoader workers of each instance (None: the program's own number), and what they leave to compute on.

    `cpus`: the CPUs set apart for them, by instance. `shared`: how many of an instance take from its CPU time, because
    they have no cores of their own or a quota counts them too.
    """

    workers: int | None
    placement: Placement
    cpus: tuple[frozenset[int], ...]
    shared: int = 0
    notes: tuple[Note, ...] = ()
    warnings: tuple[str, ...] = ()


def plan_loaders(
    host: Host,
    request: LaunchRequest,
    pool: Pool,
    placement: Placement,
    *,
    bound: bool,
    plugin_missing_reason: str | None,
) -> Loaders:
    """The DataLoader workers asked for. `bound`: the instances are confined to their CPUs.

    `plugin_missing_reason`: why no plugin will be there to start them; then they get no cores.
    Instances whose cores are not theirs alone leave the loader workers time; one of few cores shares them all.
    """
    asked = request.settings.dataloader_workers
    owned = bound and pool.pinned and placement.exclusive
    workers = None if plugin_missing_reason is not None else _auto(host, pool, placement) if asked == "auto" else asked
    if workers is None:
        reason = (
            f"fewer than {FEWEST_CORES} cores, or little memory"
            if plugin_missing_reason is None
            else f"not applied: {plugin_missing_reason}"
        )
        notes = () if asked is None else (_note(request, None, reason),)
        return Loaders(workers=None, placement=placement, cpus=(frozenset(),) * len(placement.workers), notes=notes)
    divided = [_carve(each, workers) if owned else (each, frozenset[int]()) for each in placement.workers]
    reason = _reason([cpus for _, cpus in divided]) if owned else _UNOWNED
    return Loaders(
        workers=workers,
        placement=_with_workers(placement, tuple(compute for compute, _ in divided)),
        cpus=tuple(cpus for _, cpus in divided),
        shared=0 if owned and pool.quota_threads is None else workers,
        notes=(_note(request, workers, reason),),
        warnings=_memory_warnings(host, workers, len(placement.workers)),
    )


_UNOWNED = "compute threads leave them time: the instances have no CPUs of their own"


def _with_workers(placement: Placement, workers: tuple[WorkerCpus, ...]) -> Placement:
    return Placement(
        workers=workers, exclusive=placement.exclusive, reason=placement.reason, warnings=placement.warnings
    )


def _note(request: LaunchRequest, workers: int | None, reason: str) -> Note:
    name = "dataloader_workers"
    value = "the program's own" if workers is None else str(workers)
    why = "; ".join(filter(None, (request.reasons.get(name, ""), reason)))
    return Note(setting=name, value=value, origin=request.origin(name), reason=why)


def _reason(carved: Sequence[frozenset[int]]) -> str:
    if not any(carved):
        return f"they share the instance's cores: it has fewer than {FEWEST_CORES}"
    some = "" if all(carved) else f"; an instance of fewer than {FEWEST_CORES} cores shares its own"
    return f"CPUs {format_cpulist(frozenset().union(*carved))} are theirs, no compute thread uses them{some}"


def _auto(host: Host, pool: Pool, placement: Placement) -> int | None:
    """A quarter of the smallest instance's cores, as many as memory allows; None for the program's own number."""
    cores = min(min(each.cpu_limit, len(each.cores)) for each in placement.workers)
    if pool.quota_threads is not None:
        cores = min(cores, pool.quota_threads // len(placement.workers))
    if cores < FEWEST_CORES:
        return None
    workers = min(max(1, cores // 4), MOST_AUTO)
    budget = memory_budget(host)
    if budget is not None:
        workers = min(workers, budget // MEMORY_PART // (LOADER_BYTES * len(placement.workers)))
    return workers or None


def _memory_warnings(host: Host, workers: int, instances: int) -> tuple[str, ...]:
    budget = memory_budget(host)
    need = workers * instances * LOADER_BYTES
    if budget is None or need * MEMORY_PART <= budget:
        return ()
    return (
        f"{workers * instances} DataLoader workers need about {size_text(need)} ({size_text(LOADER_BYTES)} "
        f"each), more than a quarter of the {size_text(budget)} there is (--dataloader-workers auto fits)",
    )


def _carve(whole: WorkerCpus, workers: int) -> tuple[WorkerCpus, frozenset[int]]:
    """What remains of an instance to compute on, and the CPUs of the cores that its loader workers get."""
    if len(whole.cores) < FEWEST_CORES:
        return whole, frozenset()
    taken = last_cores(whole.cores, min(workers, len(whole.cores) // 2))
    rest = worker_cpus(core for core in whole.cores if core not in taken)
    return rest, frozenset(cpu for core in taken for cpu in core.cpus)
