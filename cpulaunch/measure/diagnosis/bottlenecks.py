"""What slows a program down, each with the share of the time that it takes. Pure."""

from __future__ import annotations

from cpulaunch.measure.diagnosis.shares import shares_of
from cpulaunch.records.host import count_text
from cpulaunch.records.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cpulaunch.measure.diagnosis.figures import ProcessFigures
    from cpulaunch.measure.diagnosis.shares import Shares

LEAST_SHARE = 0.2
"""Of the steps' time: what takes less does not stand out."""
LEAST_SECOND = 0.1
MOST_FAULT_SECONDS = 200e-6
"""What the kernel takes at most to map and clear a page: 2 MB of a huge one, slowly."""
LEAST_FAULTS = 50
"""For each step."""
GROWING = 0.5
"""Share of the faulted pages that stay: from this on the program's memory grows, and the allocator returns nothing."""
FAULT_BYTES = 4096
LEAST_SLOWDOWN = 1.5
LOOP_ACCESSES, BARE_ACCESSES, MODEL_ACCESSES = 0.1, 0.3, 0.45
"""Parts taken out of tensors for each operation, from which on a loop takes one or several for each element.

Beside the model, as in a loss; in a program without modules; and in a model, which takes parts of what it computes:
heads, gates, and the steps of a sequence.
"""
OUTSIDE = 0.5
SPARE = 0.5
"""CPUs that workers of a DataLoader may use beside those of the threads, and are not said to take them."""
LEAST_READS = 10
"""Single numbers that are read in a step: fewer are no reason why it has many tiny operations."""
LEAST_LOOP = 50
"""Tiny operations in a step: fewer are no loop over the elements of something."""
MOVING = 0.6
"""Of the time in operations that move data: from this on they stand out. Some move data in every program."""
BUSY_FETCH = 0.5
"""CPU seconds of a second in which samples are made: from this on they are decoded, and not waited for."""


@record
class ProcessLimits:
    """What a process was given. `cpus`: those it may use by the launch. `nodes`: CPU -> its NUMA node.

    `threads`: how many can run at a time, which a quota limits; None: as many as there are CPUs. `shared_threads`:
    those of other processes on its CPUs, and `shared_cpus`: the CPUs that these may use, as bits. `remote_slowdown`:
    time of a read from another node's memory divided by that of a local one.
    """

    cpus: frozenset[int] = frozenset()
    threads: int | None = None
    shared_threads: int = 0
    shared_cpus: int = 0
    nodes: Mapping[int, int] = {}
    remote_slowdown: float = 1.5


@record
class Bottleneck:
    """`share`: of the steps' time, that it takes. `process`: the position of the process among the figures."""

    kind: str
    share: float
    process: int = 0
    place: str | None = None
    detail: str = ""

    @property
    def speedup(self) -> float:
        """How many times as fast the steps would be without it, at most (Amdahl's law)."""
        return 1 / max(0.01, 1 - self.share)


@record
class ProcessDiagnosis:
    """A process's figures, shares and machine."""

    figures: ProcessFigures
    shares: Shares
    machine: ProcessLimits


def diagnosed(figures: ProcessFigures, machine: ProcessLimits) -> ProcessDiagnosis:
    """The process with its shares."""
    own = _own_delay(figures, machine)
    return ProcessDiagnosis(figures=figures, shares=shares_of(figures, own_delay=own), machine=machine)


def _own_delay(figures: ProcessFigures, machine: ProcessLimits) -> float:
    """The share of the time in which a thread has no CPU, though no other program runs: 1 less CPUs by threads."""
    kind, wanted = binding_kind(figures, machine), float(_threads(figures, machine))
    if kind == "wrong-binding":
        cpus = _reachable(figures, machine)
    else:
        cpus = _given(figures, machine)
        wanted += figures.loader_cpus
    return max(0.0, 1 - cpus / max(1.0, wanted)) if kind else 0.0


def binding_kind(figures: ProcessFigures, machine: ProcessLimits) -> str:
    """oversubscribed or python-threads, if the process has more threads than CPUs; wrong-binding, if it may use fewer
    CPUs than it was given; else empty. python-threads: there are CPUs enough without those that make no steps.
    """
    given, used = _given(figures, machine), _used(figures)
    if _threads(figures, machine) > given:
        is_fit = _threads(figures, machine, beside=False) <= given
        return "python-threads" if is_fit and figures.threads_beside else "oversubscribed"
    is_alone = figures.world_size == 1 and not machine.shared_threads
    if used < min(figures.threads, given) or (used < given and is_alone and figures.threads <= used):
        return "wrong-binding"
    if _is_crowded(figures, machine):
        return "wrong-binding"
    return "oversubscribed" if _loaders_compete(figures, machine) else ""


def _threads(figures: ProcessFigures, machine: ProcessLimits, *, beside: bool = True) -> int:
    """How many threads compete for the CPUs: torch's, or all that the process itself keeps busy, and other processes'.

    One that computes in several threads of Python's has torch's threads in each of them. Other threads of a rank
    mostly move the data of collectives. `beside`: its Python threads that make no steps count, too.
    """
    wanted = figures.wanted_cpus - (0.0 if beside else figures.cpus_beside)
    busy = round(wanted) if figures.world_size == 1 and wanted > figures.threads + SPARE else 0
    return max(figures.threads, busy) + machine.shared_threads


def _is_crowded(figures: ProcessFigures, machine: ProcessLimits) -> bool:
    """Whether processes share fewer CPUs than they have threads, though the launch has CPUs for all of these."""
    reachable = _reachable(figures, machine)
    return machine.shared_threads > 0 and reachable < min(_threads(figures, machine), _given(figures, machine))


def _reachable(figures: ProcessFigures, machine: ProcessLimits) -> int:
    """How many CPUs its busy threads may use, and those of other processes on these CPUs."""
    return (figures.reachable_cpus | machine.shared_cpus).bit_count()


def _loaders_compete(figures: ProcessFigures, machine: ProcessLimits) -> bool:
    """Whether busy workers of DataLoaders have no CPUs of their own."""
    threads = _threads(figures, machine)
    return figures.loader_cpus > 0 and threads + figures.loader_cpus > _given(figures, machine) + SPARE


def _given(figures: ProcessFigures, machine: ProcessLimits) -> int:
    """How many threads of the process could run at a time."""
    cpus = len(machine.cpus) or figures.cpus.bit_count()
    return cpus if machine.threads is None else min(cpus, machine.threads)


def _used(figures: ProcessFigures) -> int:
    """How many CPUs its busy threads may use."""
    return figures.reachable_cpus.bit_count()


def bottlenecks(processes: Sequence[ProcessDiagnosis]) -> list[Bottleneck]:
    """All candidates, the largest share first. Those of one kind count once.

    Ranks wait for one another: only what all of them have counts for the job, and what one has makes it a straggler.
    """
    of_each = [_largest(_of_process(process, alone=len(processes) == 1)) for process in processes]
    ranks = [position for position, process in enumerate(processes) if process.figures.rank is not None]
    is_job = len(ranks) > 1
    found = []
    for position, candidates in enumerate(of_each):
        for kind, each in candidates.items():
            share = min(of_each[rank][kind].share if kind in of_each[rank] else 0.0 for rank in ranks) if is_job else 1
            found.append(replace(each, process=position, share=min(each.share, share)))
    return list(_largest([*found, *_between(processes)]).values())


def _largest(candidates: Iterable[Bottleneck]) -> dict[str, Bottleneck]:
    """The largest of each kind, by kind, the largest of all first."""
    largest: dict[str, Bottleneck] = {}
    for each in sorted(candidates, key=lambda each: -each.share):
        largest.setdefault(each.kind, each)
    return largest


def _of_process(process: ProcessDiagnosis, *, alone: bool) -> Iterator[Bottleneck]:
    yield from _placement(process)
    yield from _data(process)
    yield from _many_operations(process)
    yield from _memory(process)
    yield from _precision(process)
    shares, where = process.shares, process.figures.where
    if alone:
        yield Bottleneck(kind="slow-collective", share=shares.collective, place=where.first("collective"))
    if shares.moving > MOVING:
        share = shares.moving * _chained_part(process.figures) - fault_share(process)
        yield Bottleneck(kind="memory-bound", share=share, place=where.first("", "backward"))


def _chained_part(figures: ProcessFigures) -> float:
    """Of the time in operations that move data, what they would save if chains of element-wise ones were fused."""
    window = figures.window or {}
    moving = float(window.get("kinds", {}).get("other", 0.0))
    return min(1.0, float(window.get("chained", 0.0)) / moving) if moving > 0 else 0.0


def _placement(process: ProcessDiagnosis) -> Iterator[Bottleneck]:
    figures, shares, machine = process.figures, process.shares, process.machine
    kind = binding_kind(figures, machine)
    given, used = _given(figures, machine), _used(figures)
    if kind == "wrong-binding":
        parallel = min(1.0, shares.operations + shares.delayed)
        if _is_crowded(figures, machine):  # All of the one runs beside all of the other, and they wait for each other.
            used, parallel = _reachable(figures, machine), 1 - shares.waiting
        yield Bottleneck(kind=kind, share=(1 - used / max(1, given)) * parallel, detail=f"{used} of {given}")
    elif kind:
        threads = _threads(figures, machine)
        lost = max(0.0, 1 - given / threads) * shares.operations
        loaders = f" threads and {count_text(figures.loader_workers or 0, 'worker')} of a DataLoader"
        named = f"{threads}{loaders if threads <= given else ''}"
        if kind == "python-threads":
            named = f"{figures.threads} of torch's and {count_text(figures.threads_beside, 'other')}"
        yield Bottleneck(kind=kind, share=max(shares.delayed, lost), detail=f"{named} on {count_text(given, 'CPU')}")


def _data(process: ProcessDiagnosis) -> Iterator[Bottleneck]:
    figures, shares = process.figures, process.shares
    where = figures.where
    if shares.data > 0:
        fetches = figures.fetches
        running = max(fetches.get("cpu", 0.0), fetches.get("seconds", 0.0) - fetches.get("delay", 0.0))
        used = fetches.get("cpu", 0.0) / running if running > 0 else 0.0
        if figures.loader_workers == 0:  # The delays of this process are those of its fetches, too.
            waited = figures.sum("data_seconds") - figures.sum("data_cpu")
            blocked = max(0.0, waited - figures.sum("thread_delay") * figures.sum("data_cpu") / _cpu(figures))
            used = figures.sum("data_cpu") / max(1e-9, figures.sum("data_cpu") + blocked)
        kind = "decode" if used >= BUSY_FETCH else "data-wait"
        yield Bottleneck(kind=kind, share=shares.data, place=where.first("data"), detail="a DataLoader")
    outside = shares.python + shares.waiting
    own = where.share("getitem", "generator")
    in_what = "a generator" if where.share("generator") > where.share("getitem") else "__getitem__"
    of_data = min(own, outside)
    if of_data > 0:
        kind = "decode" if shares.python >= shares.waiting else "data-wait"
        yield Bottleneck(kind=kind, share=of_data, place=where.first("getitem", "generator"), detail=in_what)
    left = 1 - of_data / max(1e-9, outside)
    unmapping = max(0.0, fault_share(process) - _outside_python(shares))
    yield Bottleneck(kind="python-code", share=max(0.0, shares.python * left - unmapping), place=where.first(""))
    yield Bottleneck(kind="waiting", share=shares.waiting * left, place=where.first(""))


def _cpu(figures: ProcessFigures) -> float:
    return max(1e-9, figures.sum("thread_cpu"))


def _many_operations(process: ProcessDiagnosis) -> Iterator[Bottleneck]:
    """Operations that are too small: reads of single numbers, loops over elements, or just many."""
    figures, shares = process.figures, process.shares
    window = figures.window
    if window is None:
        return
    calls, tiny = window["calls"], window["tiny"]

    def in_step(count: int) -> str:
        return f"{count / max(1e-9, figures.examined_steps):.0f}"

    place = figures.where.first("") or figures.where.first("backward")
    forward = max(1, calls.get("forward", 0))
    reads = calls.get("synchronization", 0)
    computing = max(0, forward - reads - calls.get("accesses", 0))
    is_reading = reads >= LEAST_READS * figures.examined_steps and reads * 5 >= calls.get("all", forward)
    if is_reading and reads * 2 >= computing:  # Taking out what is then read goes with the reads.
        yield Bottleneck(
            kind="synchronization", share=shares.synchronization + shares.tiny, place=place, detail=in_step(reads)
        )
        return
    yield Bottleneck(kind="synchronization", share=shares.synchronization, place=place, detail=in_step(reads))
    outside = calls.get("outside", 0)  # A program without modules has all of them outside.
    is_beside = OUTSIDE * forward <= outside < forward
    in_loss = tiny["outside"] > 0 and OUTSIDE * forward <= calls.get("loss", 0) < forward
    count = calls.get("tiny", 0) / max(1e-9, figures.examined_steps)
    small = max(calls.get("tiny", 0), calls.get("accesses", 0)) / max(1e-9, figures.examined_steps)
    is_loop = small >= LEAST_LOOP and (_takes_apart(calls, is_beside=is_beside) or in_loss)
    is_many = calls.get("tiny", 0) * 2 >= calls.get("all", 0)
    called = shares.overhead if is_many or shares.overhead + shares.tiny >= shares.operations else 0.0
    share = shares.tiny + called + (shares.access if is_loop else 0.0)
    kind = "python-loop" if is_loop else "tiny-operations"
    yield Bottleneck(kind=kind, share=share, place=place, detail=f"{count:.0f}" if count >= 1 else "some")


def _takes_apart(calls: Mapping[str, int], *, is_beside: bool) -> bool:
    """Whether elements are taken out of tensors one by one. `is_beside`: most operations are beside those of models."""
    forward, outside = max(1, calls.get("forward", 0)), calls.get("outside", 0)
    if is_beside:
        return bool(calls.get("outside_accesses", 0) >= LOOP_ACCESSES * outside)
    return bool(calls.get("accesses", 0) >= (BARE_ACCESSES if outside >= forward else MODEL_ACCESSES) * forward)


def _memory(process: ProcessDiagnosis) -> Iterator[Bottleneck]:
    figures, shares, machine = process.figures, process.shares, process.machine
    faults = figures.sum("thread_minflt") / max(1, figures.steps)
    share = min(1.0, fault_share(process) + shares.allocation)
    stays = figures.sum("rss") / max(1.0, figures.sum("process_minflt") * FAULT_BYTES)
    kind = "growing-memory" if faults >= LEAST_FAULTS and stays >= GROWING else "allocator"
    yield Bottleneck(kind=kind, share=share, place=figures.where.first(""), detail=f"{faults:,.0f}")
    remote = remote_share(figures, machine)
    if remote > 0:
        lost = 1 - 1 / (1 + remote * (machine.remote_slowdown - 1))
        share = lost * min(1.0, shares.operations)
        yield Bottleneck(kind="remote-memory", share=share, detail=f"{remote:.0%}")


def fault_share(process: ProcessDiagnosis) -> float:
    """The share of the time in which the kernel maps memory for operations, and unmaps it between them."""
    figures, shares = process.figures, process.shares
    steps, faults = max(1, figures.steps), figures.sum("thread_minflt")
    if faults / steps < LEAST_FAULTS:
        return 0.0
    spent = min(figures.sum("thread_stime"), faults * MOST_FAULT_SECONDS)
    largest = _outside_python(shares) + shares.python
    return min(spent / max(1e-9, shares.seconds * steps), largest)


def _outside_python(shares: Shares) -> float:
    """The share of what may map memory, without the time between operations."""
    return shares.operations + shares.access + shares.allocation + shares.overhead + shares.unknown


def remote_share(figures: ProcessFigures, machine: ProcessLimits) -> float:
    """The share of the process's memory on NUMA nodes on which its threads do not run."""
    total = sum(figures.pages.values())
    near = {node for cpu, node in machine.nodes.items() if figures.reachable_cpus >> cpu & 1}
    if not total or not near or len(set(machine.nodes.values()) | set(figures.pages)) < 2:
        return 0.0
    return sum(size for node, size in figures.pages.items() if node not in near) / total


def _precision(process: ProcessDiagnosis) -> Iterator[Bottleneck]:
    slowdowns, window = process.figures.slowdowns, process.figures.window or {}
    of_types = {str(name): float(seconds) for name, seconds in (window.get("low") or {}).items()}
    used = [name for name in of_types if name in slowdowns] or sorted(slowdowns)
    named = max(used, key=lambda name: of_types.get(name, 0.0), default="")
    slowdown = slowdowns.get(named, 0.0)
    if slowdown >= LEAST_SLOWDOWN:
        share = process.shares.low_products * (1 - 1 / slowdown)
        yield Bottleneck(kind="low-precision", share=share, place=process.figures.where.first(""), detail=named)


def _between(processes: Sequence[ProcessDiagnosis]) -> Iterator[Bottleneck]:
    """Bottlenecks between the ranks of a job: all wait for collectives, or all but one wait for that one."""
    ranks = [(position, each) for position, each in enumerate(processes) if each.figures.rank is not None]
    if len(ranks) < 2:
        return
    work = [each.shares.seconds * (1 - each.shares.collective) for _, each in ranks]
    slowest = max(range(len(ranks)), key=work.__getitem__)
    position, process = ranks[slowest]
    imbalance = 1 - sum(work) / len(work) / max(1e-9, work[slowest])
    yield Bottleneck(
        kind="straggler",
        share=imbalance * (1 - _waiting_for_ranks(process)),
        process=position,
        place=process.figures.where.first("", "backward", "data"),
        detail=f"{process.figures.rank}",
    )
    common = min(_waiting_for_ranks(each) for _, each in ranks)
    place = ranks[0][1].figures.where.first("collective")
    yield Bottleneck(kind="slow-collective", share=common, process=position, place=place)


def _waiting_for_ranks(process: ProcessDiagnosis) -> float:
    """The share of the time in collectives, of all time: that which others took from one rank delays all."""
    figures, shares = process.figures, process.shares
    whole = max(1e-9, figures.seconds / max(1, figures.steps))
    return min(1.0, shares.collective * shares.seconds / whole)
