"""The plan for a request on a host: the one place where all decisions meet."""

from __future__ import annotations

from cpulaunch.plan.assemble_environment import Decisions, tune
from cpulaunch.plan.command import bound_argv, program_argv, rank_argv
from cpulaunch.plan.notes import asked_notes, binder_note, instances_note, notice_notes
from cpulaunch.plan.placement.instances import Placement, WorkerCpus, place
from cpulaunch.plan.placement.loaders import plan_loaders
from cpulaunch.plan.placement.memory import Memory, check_binder, place_memory
from cpulaunch.plan.placement.pool import Pool, select_pool
from cpulaunch.plan.placement.quota import place_unpinned
from cpulaunch.plan.placement.threads import default_threads
from cpulaunch.plan.plugin.checks import TorchChoices, choose_torch_settings
from cpulaunch.plan.plugin.settings import check_reserved_variables, graph_notes
from cpulaunch.plan.variables.preloads import Trials, choose_preloads, preload_candidates
from cpulaunch.plan.variables.resolve import Environment
from cpulaunch.plan.variables.thread_variables import decide_compute
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchOptions, LaunchPlan, Mode, WorkerPlan
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.settings import COLLECTIVE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cpulaunch.plan.plugin.collectives import Collectives
    from cpulaunch.plan.plugin.timings import CollectiveMeasurement
    from cpulaunch.plan.ranks.job_ranks import Ranks

__all__ = ["make_plan", "preload_candidates"]


def make_plan(
    host: Host,
    request: LaunchRequest,
    *,
    trials: Trials | None = None,
    measurement: CollectiveMeasurement | None = None,
) -> LaunchPlan:
    """The plan: every worker, every value with origin and reason, every warning.

    `trials`: library path -> None if the worker's interpreter started with it, else the reason; None: nothing
    was tried (another machine's plan), so libraries are named without a trial. `measurement`: how long
    collectives took here, for --dist-backend auto; None: not measured.
    Raises: UsageError if the request cannot be met on this host.
    """
    check_binder(request)
    check_reserved_variables(request)
    pool = select_pool(host, request)
    bound = host.can_bind and request.settings.binder != "none"
    ranks = _ranks(host, request, pool)
    whole = _placed(host, request, pool) if ranks is None else ranks.placement
    started = _started(request, len(whole.workers)) if ranks is None else ranks.local_ranks
    if request.scheduled_rank is None:
        _check_indexes(request.settings.show, frozenset(started), "--show")
    choices = choose_torch_settings(host, request)
    loaders = plan_loaders(host, request, pool, whole, bound=bound, plugin_missing_reason=choices.plugin_missing_reason)
    collectives = _collectives(host, request, (pool, loaders.placement, bound, ranks), choices, measurement)
    placement, choices = (
        (loaders.placement, choices) if collectives is None else (collectives.placement, collectives.choices)
    )
    compute = decide_compute(request, default_threads(pool, placement, request, loaders=loaders.shared))
    memory = place_memory(host, request, whole.workers)
    preloads = choose_preloads(host, request, trials)
    variable_requests = (
        *(() if ranks is None else ranks.variable_requests),
        *(() if collectives is None else collectives.variable_requests),
    )
    tuned = tune(
        host, request, Decisions(pool, placement, compute, preloads, loaders, choices, bound, variable_requests)
    )
    options = _launch_options(request, choices, ranks)
    communicating = () if collectives is None else collectives.cpus
    seats = _Seats(placement.workers, compute.threads, loaders.cpus, communicating, memory, bound, ranks)
    return LaunchPlan(
        mode=_mode(request),
        profile=request.profile,
        world_size=len(placement.workers) if ranks is None else ranks.world_size,
        workers=_workers(request, started, seats, tuned.environment, supervised=options.supervised),
        notes=(
            *(instances_note(request, placement), *(() if ranks is None else ranks.notes)),
            *(*pool.notes, *memory.notes, binder_note(host, request)),
            *(*preloads.notes, *notice_notes(request), *asked_notes(request, choices.not_applied)),
            *(*loaders.notes, *(() if collectives is None else collectives.notes)),
            *(*graph_notes(host, choices, len(whole.workers)), *tuned.environment.notes),
        ),
        warnings=_once(
            *(request.warnings, () if ranks is None else ranks.warnings),
            *(_binding_warnings(host, request), pool.warnings, placement.warnings, compute.warnings),
            *(
                memory.warnings,
                preloads.warnings,
                loaders.warnings,
                () if collectives is None else collectives.warnings,
            ),
            tuned.warnings,
        ),
        launch=options,
        job=None if ranks is None else ranks.job,
        unmeasured=collectives is not None and collectives.unmeasured,
    )


def _ranks(host: Host, request: LaunchRequest, pool: Pool) -> Ranks | None:
    if not request.distributed:
        return None
    from cpulaunch.plan.ranks.job_ranks import plan_ranks

    return plan_ranks(host, request, pool)


def _collectives(
    host: Host,
    request: LaunchRequest,
    seats: tuple[Pool, Placement, bool, Ranks | None],
    choices: TorchChoices,
    measurement: CollectiveMeasurement | None,
) -> Collectives | None:
    if not any(name in request.origins for name in COLLECTIVE):
        return None
    from cpulaunch.plan.plugin.collectives import PlacedWorkers, plan_collectives

    return plan_collectives(host, request, PlacedWorkers(*seats), choices=choices, measurement=measurement)


def _placed(host: Host, request: LaunchRequest, pool: Pool) -> Placement:
    return place(pool, request.settings) if pool.pinned else place_unpinned(host, pool, request.settings)


@record(kw_only=False)
class _Seats:
    """What every worker gets, by index; `ccl_cpus` empty: oneCCL has no threads."""

    workers: tuple[WorkerCpus, ...]
    threads: tuple[int, ...]
    loader_cpus: tuple[frozenset[int], ...]
    ccl_cpus: tuple[frozenset[int], ...]
    memory: Memory
    bound: bool
    ranks: Ranks | None


def _mode(request: LaunchRequest) -> Mode:
    settings = request.settings
    if request.distributed:
        return "ranks"
    return "single" if settings.instances is None and settings.cores_per_instance is None else "instances"


def _once(*groups: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(warning for group in groups for warning in group))


def _started(request: LaunchRequest, count: int) -> tuple[int, ...]:
    """The indexes of the workers to start. Raises: UsageError if one is asked for that the plan has not."""
    chosen = request.settings.instance_index
    _check_indexes(chosen, frozenset(range(count)), "--instance-index")
    return tuple(range(count)) if chosen is None else tuple(sorted(chosen))


def _check_indexes(asked: frozenset[int] | None, present: frozenset[int], flag: str) -> None:
    absent = (asked or frozenset()) - present
    if absent:
        raise UsageError(
            "no such worker",
            value=format_cpulist(absent),
            source=flag,
            hint=f"{flag} may name {format_cpulist(present)}",
        )


def _launch_options(request: LaunchRequest, choices: TorchChoices, ranks: Ranks | None) -> LaunchOptions:
    settings = request.settings
    return LaunchOptions(
        binder=settings.binder,
        grace_seconds=settings.grace if ranks is None else ranks.grace_seconds,
        log_dir=settings.log_dir,
        show=settings.show if ranks is None else ranks.show,
        buffered=settings.buffered,
        strict=settings.strict,
        report=settings.report,
        metric=settings.metric,
        start_barrier=settings.start_barrier,
        plugin=choices.plugin,
    )


def _workers(
    request: LaunchRequest, started: tuple[int, ...], seats: _Seats, environment: Environment, *, supervised: bool
) -> tuple[WorkerPlan, ...]:
    replaces_launcher = len(seats.workers) == 1 and not supervised and seats.ranks is None
    unbuffered = not (replaces_launcher or request.settings.buffered)
    argv = program_argv(request.program, unbuffered=unbuffered, run_path=request.settings.run_path)
    return tuple(_worker(request, index, seats, environment, argv=argv) for index in started)


def _worker(
    request: LaunchRequest, index: int, seats: _Seats, environment: Environment, *, argv: tuple[str, ...]
) -> WorkerPlan:
    cpus = seats.workers[index].cpus if seats.bound else frozenset()
    nodes = seats.memory.nodes[index] if seats.bound else frozenset()
    policy = seats.memory.policies[index]
    ranks = seats.ranks
    if ranks is not None:
        argv = rank_argv(argv, index)
    return WorkerPlan(
        index=index if request.scheduled_rank is None else request.scheduled_rank.rank,
        cpus=cpus,
        loader_cpus=seats.loader_cpus[index],
        ccl_cpus=seats.ccl_cpus[index] if seats.ccl_cpus else frozenset(),
        numa_nodes=nodes,
        mempolicy=policy,
        threads=seats.threads[index],
        env=(
            *((name, values[index]) for name, values in environment.per_worker),
            *environment.changes,
            *(() if ranks is None else ranks.variables[index]),
        ),
        argv=bound_argv(argv, binder=request.settings.binder, cpus=cpus, mempolicy=policy, nodes=nodes),
        rank=None if ranks is None else ranks.global_ranks[index],
        local_rank=None if ranks is None else index,
        gpu=None if ranks is None else ranks.gpus[index],
    )


def _binding_warnings(host: Host, request: LaunchRequest) -> tuple[str, ...]:
    if host.can_bind or request.settings.binder == "none":
        return ()
    return ("binding is not supported on this operating system: threads are limited, CPUs are not chosen",)
