"""The plan for a request on a host: the one place where all decisions meet."""

from __future__ import annotations

from cpulaunch.plan.assemble_environment import Decisions, assemble_environment
from cpulaunch.plan.command import bound_argv, program_argv, rank_argv
from cpulaunch.plan.notes import binder_note, instances_note, python_notes, setting_notes
from cpulaunch.plan.placement.instances import HostWorkers, place
from cpulaunch.plan.placement.loaders import plan_loaders
from cpulaunch.plan.placement.memory import check_binder, place_memory
from cpulaunch.plan.placement.pool import Pool, select_pool
from cpulaunch.plan.placement.quota import place_unpinned
from cpulaunch.plan.placement.threads import default_threads
from cpulaunch.plan.plugin.checks import Collectives, TorchChoices, choose_torch_settings
from cpulaunch.plan.plugin.settings import check_reserved_variables, weight_memory_notes
from cpulaunch.plan.variables.preloads import Trials, choose_preloads, preload_candidates
from cpulaunch.plan.variables.resolve import Environment
from cpulaunch.plan.variables.thread_variables import plan_threads
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchOptions, LaunchPlan, Mode, Note, WorkerPlan
from cpulaunch.records.record import replace
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.settings import COLLECTIVE_SETTINGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.plan.instance_identity import Instance
    from cpulaunch.plan.plugin.timings import CollectiveMeasurement

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
    decisions = _decide(host, request, trials, measurement)
    launch = _launch_options(request, decisions)
    workers = _workers(request, decisions, supervised=launch.supervised)
    environment = assemble_environment(host, request, decisions, workers)
    return LaunchPlan(
        mode=_mode(request),
        profile=request.profile,
        world_size=decisions.workers.world_size,
        workers=tuple(_complete(workers[index], index, decisions, environment) for index in decisions.workers.started),
        notes=_notes(host, request, decisions, environment),
        warnings=_warnings(host, request, decisions, environment),
        launch=launch,
        job=decisions.workers.job,
        unmeasured=decisions.collectives.unmeasured,
    )


def _decide(
    host: Host, request: LaunchRequest, trials: Trials | None, measurement: CollectiveMeasurement | None
) -> Decisions:
    check_binder(request)
    check_reserved_variables(request)
    pool = select_pool(host, request)
    workers = _ranks(host, request, pool) if request.distributed else _instances(host, request, pool)
    if request.scheduled_rank is None:
        _check_indexes(request.settings.show, workers.started, "--show")
        _check_indexes(_reader(request.settings.stdin), workers.started, "--stdin")
    bound = host.can_bind and request.settings.binder != "none"
    owned = bound and pool.pinned and workers.placement.exclusive
    choices = choose_torch_settings(host, request)
    loaders = plan_loaders(
        host, request, pool, workers.placement, owned=owned, plugin_missing_reason=choices.plugin_missing_reason
    )
    collectives = _collectives(
        host, request, replace(workers, placement=loaders.placement), choices, owned=owned, measurement=measurement
    )
    cpus = [worker.cpus for worker in workers.placement.workers]
    defaults = default_threads(pool, collectives.placement, request, loaders=loaders.sharing)
    return Decisions(
        pool=pool,
        workers=workers,
        bound=bound,
        owned=owned,
        loaders=loaders,
        collectives=collectives,
        threads=plan_threads(request, defaults),
        memory=place_memory(host, request, workers.placement.workers),
        preloads=choose_preloads(host, request, trials),
        instances=_identities(request, cpus),
    )


def _identities(request: LaunchRequest, cpus: Sequence[frozenset[int]]) -> tuple[Instance, ...]:
    if _mode(request) != "instances":
        return ()
    from cpulaunch.plan.instance_identity import instances

    return instances(cpus)


def _ranks(host: Host, request: LaunchRequest, pool: Pool) -> HostWorkers:
    from cpulaunch.plan.ranks.job_ranks import plan_ranks

    return plan_ranks(host, request, pool)


def _instances(host: Host, request: LaunchRequest, pool: Pool) -> HostWorkers:
    """The workers of a launch that is no job. Raises: UsageError if --instance-index names one that does not exist."""
    settings = request.settings
    placement = place(pool, settings) if pool.pinned else place_unpinned(host, pool, settings)
    instances, chosen = len(placement.workers), settings.instance_index
    _check_indexes(chosen, range(instances), "--instance-index")
    return HostWorkers(
        placement=placement,
        started=tuple(range(instances) if chosen is None else sorted(chosen)),
        world_size=instances,
        global_ranks=(None,) * instances,
        gpus=(None,) * instances,
        variables=((),) * instances,
        grace_seconds=settings.grace,
        show=settings.show,
    )


def _reader(stdin: str | None) -> frozenset[int]:
    """The worker that --stdin names, if it names one."""
    return frozenset({int(stdin)}) if stdin is not None and stdin.isdecimal() else frozenset()


def _check_indexes(requested: frozenset[int] | None, present: tuple[int, ...] | range, flag: str) -> None:
    absent = (requested or frozenset()).difference(present)
    if absent:
        raise UsageError(
            "no such worker",
            value=format_cpulist(absent),
            source=flag,
            hint=f"{flag} may name {format_cpulist(present)}",
        )


def _collectives(
    host: Host,
    request: LaunchRequest,
    workers: HostWorkers,
    choices: TorchChoices,
    *,
    owned: bool,
    measurement: CollectiveMeasurement | None,
) -> Collectives:
    if not any(name in request.origins for name in COLLECTIVE_SETTINGS):
        return Collectives(placement=workers.placement, choices=choices)
    from cpulaunch.plan.plugin.collectives import plan_collectives

    return plan_collectives(host, request, workers, choices, owned=owned, measurement=measurement)


def _mode(request: LaunchRequest) -> Mode:
    settings = request.settings
    if request.distributed:
        return "ranks"
    return "single" if settings.instances is None and settings.cores_per_instance is None else "instances"


def _launch_options(request: LaunchRequest, decisions: Decisions) -> LaunchOptions:
    settings = request.settings
    return LaunchOptions(
        binder=settings.binder,
        grace_seconds=decisions.workers.grace_seconds,
        log_dir=settings.log_dir,
        show=decisions.workers.show,
        stdin=settings.stdin,
        buffered=settings.buffered,
        strict=settings.strict,
        quiet=settings.quiet,
        report=settings.report,
        html=settings.html,
        metric=settings.metric,
        start_barrier=settings.start_barrier,
        plugin=decisions.choices.plugin,
    )


def _workers(request: LaunchRequest, decisions: Decisions, *, supervised: bool) -> tuple[WorkerPlan, ...]:
    """All workers of this host, also those that are not to be started here, still without their environment."""
    count = len(decisions.placement.workers)
    replaces_launcher = count == 1 and not supervised and decisions.workers.job is None
    unbuffered = not (replaces_launcher or request.settings.buffered)
    argv = program_argv(request.program, unbuffered=unbuffered, run_path=request.settings.run_path)
    return tuple(_worker(request, decisions, index, argv) for index in range(count))


def _worker(request: LaunchRequest, decisions: Decisions, index: int, argv: tuple[str, ...]) -> WorkerPlan:
    is_rank = decisions.workers.job is not None
    cpus = decisions.placement.workers[index].cpus if decisions.bound else frozenset()
    nodes = decisions.memory.nodes[index] if decisions.bound else frozenset()
    policy = decisions.memory.policies[index]
    argv = rank_argv(argv, index) if is_rank else argv
    if decisions.instances and request.program is not None:
        first = len(argv) - len(request.program.args)
        argv = (*argv[:first], *map(decisions.instances[index].expand, argv[first:]))
    return WorkerPlan(
        index=index if request.scheduled_rank is None else request.scheduled_rank.rank,
        cpus=cpus,
        loader_cpus=decisions.loaders.cpus[index],
        ccl_cpus=decisions.collectives.ccl_cpus[index] if decisions.collectives.ccl_cpus else frozenset(),
        numa_nodes=nodes,
        mempolicy=policy,
        threads=decisions.threads.counts[index],
        env=(),
        argv=bound_argv(argv, binder=request.settings.binder, cpus=cpus, mempolicy=policy, nodes=nodes),
        rank=decisions.workers.global_ranks[index],
        local_rank=index if is_rank else None,
        gpu=decisions.workers.gpus[index],
    )


def _complete(worker: WorkerPlan, index: int, decisions: Decisions, environment: Environment) -> WorkerPlan:
    return replace(worker, env=(*environment.of_worker(index), *decisions.workers.variables[index]))


def _notes(host: Host, request: LaunchRequest, decisions: Decisions, environment: Environment) -> tuple[Note, ...]:
    return (
        instances_note(request, decisions.placement),
        *python_notes(host, request),
        *decisions.workers.notes,
        *decisions.pool.notes,
        *decisions.memory.notes,
        binder_note(host, request),
        *decisions.preloads.notes,
        *setting_notes(request, decisions.choices),
        *decisions.loaders.notes,
        *decisions.collectives.notes,
        *weight_memory_notes(host, decisions.choices, len(decisions.placement.workers)),
        *environment.notes,
    )


def _warnings(host: Host, request: LaunchRequest, decisions: Decisions, environment: Environment) -> tuple[str, ...]:
    """All warnings, each once."""
    unbound = not host.can_bind and request.settings.binder != "none"
    warnings = (
        *request.warnings,
        *decisions.workers.warnings,
        *((_CANNOT_BIND,) if unbound else ()),
        *decisions.pool.warnings,
        *decisions.placement.warnings,
        *decisions.threads.warnings,
        *decisions.memory.warnings,
        *decisions.preloads.warnings,
        *decisions.loaders.warnings,
        *decisions.collectives.warnings,
        *environment.warnings,
    )
    return tuple(dict.fromkeys(warnings))


_CANNOT_BIND = "workers cannot be bound to CPUs on this operating system; only their thread counts are set"
