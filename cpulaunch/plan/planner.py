"""The plan for a request on a host: the one place where all decisions meet."""

from dataclasses import dataclass

from cpulaunch.cpulist import format_cpulist
from cpulaunch.errors import UsageError
from cpulaunch.host import Host
from cpulaunch.plan.allocator import allocator_wishes, compile_threads, huge_page_warnings
from cpulaunch.plan.command import bound_argv, program_argv
from cpulaunch.plan.compute import Compute, decide_compute
from cpulaunch.plan.environment import Environment, Wish, resolve
from cpulaunch.plan.memory import Memory, check_binder, place_memory
from cpulaunch.plan.model import LaunchOptions, LaunchPlan, Mode, Note, WorkerPlan
from cpulaunch.plan.openmp import hazards, pinning, waiting
from cpulaunch.plan.placement import Placement, place
from cpulaunch.plan.pool import Pool, select_pool
from cpulaunch.plan.preloads import Preloads, Trials, choose_preloads, preload_candidates
from cpulaunch.plan.sharing import place_unpinned
from cpulaunch.plan.threads import default_threads
from cpulaunch.request import LaunchRequest

__all__ = ["make_plan", "preload_candidates"]


def make_plan(host: Host, request: LaunchRequest, *, trials: Trials | None = None) -> LaunchPlan:
    """The plan: every worker, every value with origin and reason, every warning.

    `trials`: library path -> None if the worker's interpreter started with it, else the reason; None: nothing
    was tried (another machine's plan), so libraries are named without a trial.
    Raises: UsageError if the request cannot be met on this host.
    """
    check_binder(request)
    pool = select_pool(host, request)
    placement = place(pool, request.settings) if pool.pinned else place_unpinned(host, pool, request.settings)
    started = _started(request, len(placement.slots))
    compute = decide_compute(request, default_threads(pool, placement, request))
    memory = place_memory(host, request, placement.slots)
    preloads = choose_preloads(host, request, trials)
    tuned = _tune(host, request, _Decisions(pool, placement, compute, preloads))
    launch = _launch_options(request, started)
    workers = _workers(host, request, started, _Parts(placement, compute, memory, tuned.environment, launch))
    return LaunchPlan(
        mode=_mode(request),
        profile=request.profile,
        world_size=len(placement.slots),
        workers=workers,
        notes=(
            _instances_note(request, placement),
            *pool.notes,
            *memory.notes,
            _binder_note(host, request),
            *preloads.notes,
            *tuned.environment.notes,
        ),
        warnings=tuple(
            dict.fromkeys(
                (
                    *_binding_warnings(host, request),
                    *pool.warnings,
                    *placement.warnings,
                    *compute.warnings,
                    *memory.warnings,
                    *preloads.warnings,
                    *tuned.warnings,
                )
            )
        ),
        launch=launch,
    )


@dataclass(frozen=True, slots=True)
class _Decisions:
    pool: Pool
    placement: Placement
    compute: Compute
    preloads: Preloads


@dataclass(frozen=True, slots=True)
class _Tuned:
    environment: Environment
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Parts:
    placement: Placement
    compute: Compute
    memory: Memory
    environment: Environment
    launch: LaunchOptions


def _mode(request: LaunchRequest) -> Mode:
    settings = request.settings
    return "single" if settings.instances is None and settings.cores_per_instance is None else "instances"


def _tune(host: Host, request: LaunchRequest, made: _Decisions) -> _Tuned:
    """The environment of the workers and the warnings it gives rise to."""
    slots, preloads = made.placement.slots, made.preloads
    wait = waiting(request, preloads.runtime, _shared(host, request, made))
    bound = _binds(host, request) and made.pool.pinned
    pins = pinning(request, preloads.runtime, slots, bound=bound)
    wishes = (
        *made.compute.wishes,
        Wish(name="OMP_SCHEDULE", value="STATIC", origin="default", reason="equal chunks stay with their thread"),
        *wait.wishes,
        *pins.wishes,
        *allocator_wishes(request, preloads.allocator),
        compile_threads(host, made.compute.threads),
    )
    resolved = resolve(request, wishes, replaced=made.compute.malformed)
    return _Tuned(
        environment=_with_preloads(resolved, preloads),
        warnings=(
            *wait.warnings,
            *pins.warnings,
            *hazards(request, made.compute.threads),
            *huge_page_warnings(host, request),
        ),
    )


def _with_preloads(environment: Environment, preloads: Preloads) -> Environment:
    """The environment with the preload list, which holds the user's own too."""
    if preloads.ld_preload is None:
        return environment
    note = Note(
        setting="LD_PRELOAD",
        value=preloads.ld_preload,
        origin=preloads.origin,
        reason="the libraries above, after your own",
    )
    return Environment(
        changes=(
            *(change for change in environment.changes if change[0] != "LD_PRELOAD"),
            ("LD_PRELOAD", preloads.ld_preload),
        ),
        per_worker=environment.per_worker,
        notes=(*(entry for entry in environment.notes if entry.setting != "LD_PRELOAD"), note),
    )


def _shared(host: Host, request: LaunchRequest, made: _Decisions) -> str | None:
    """Why a worker's CPUs are not its own; None if they are."""
    if made.pool.quota_threads is not None or not made.pool.pinned:
        return "a CPU quota is in force"
    if not made.placement.exclusive:
        return "instances share cores (--oversubscribe)"
    slots = made.placement.slots
    if any(count > slot.width for count, slot in zip(made.compute.threads, slots, strict=True)):
        return "there are more threads than CPUs"
    if len(slots) > 1 and not _binds(host, request):
        return "the workers are not bound to CPUs of their own"
    return None


def _binds(host: Host, request: LaunchRequest) -> bool:
    return host.can_bind and request.settings.binder != "none"


def _started(request: LaunchRequest, count: int) -> tuple[int, ...]:
    """The indexes of the workers to start. Raises: UsageError if one is asked for that the plan has not."""
    chosen = request.settings.instance_index
    _check_indexes(chosen, frozenset(range(count)), "--instance-index")
    started = tuple(range(count)) if chosen is None else tuple(sorted(chosen))
    _check_indexes(request.settings.show, frozenset(started), "--show")
    return started


def _check_indexes(asked: frozenset[int] | None, present: frozenset[int], flag: str) -> None:
    absent = (asked or frozenset()) - present
    if absent:
        raise UsageError(
            "no such worker",
            value=format_cpulist(absent),
            source=flag,
            hint=f"{flag} may name {format_cpulist(present)}",
        )


def _launch_options(request: LaunchRequest, started: tuple[int, ...]) -> LaunchOptions:
    settings = request.settings
    return LaunchOptions(
        binder=settings.binder,
        grace_seconds=settings.grace,
        log_dir=settings.log_dir,
        show=settings.show,
        buffered=settings.buffered,
        strict=settings.strict,
    )


def _workers(host: Host, request: LaunchRequest, started: tuple[int, ...], parts: _Parts) -> tuple[WorkerPlan, ...]:
    settings = request.settings
    alone = len(parts.placement.slots) == 1 and settings.log_dir is None and settings.show is None
    argv = program_argv(request.program, unbuffered=not alone and not settings.buffered)
    bound = _binds(host, request)
    environment, memory = parts.environment, parts.memory
    workers = []
    for index in started:
        cpus = parts.placement.slots[index].cpus if bound else frozenset()
        policy = memory.policies[index]
        workers.append(
            WorkerPlan(
                index=index,
                cpus=cpus,
                numa_nodes=memory.nodes[index] if bound else frozenset(),
                mempolicy=policy,
                threads=parts.compute.threads[index],
                env=(*((name, values[index]) for name, values in environment.per_worker), *environment.changes),
                argv=bound_argv(argv, binder=settings.binder, cpus=cpus, mempolicy=policy, nodes=memory.nodes[index])
                if argv
                else (),
            )
        )
    return tuple(workers)


def _instances_note(request: LaunchRequest, placement: Placement) -> Note:
    origins = (request.origin("instances"), request.origin("cores_per_instance"))
    origin = next((origin for origin in origins if origin != "default"), "default")
    return Note(setting="instances", value=str(len(placement.slots)), origin=origin, reason=placement.reason)


def _binder_note(host: Host, request: LaunchRequest) -> Note:
    binder = request.settings.binder
    reason = {
        "native": "system calls before the program starts, inherited by all of its threads",
        "numactl": "numactl starts each worker",
        "taskset": "taskset starts each worker; it sets CPUs only",
        "none": "nobody binds: the kernel moves threads as it likes",
    }[binder]
    if not host.can_bind:
        reason = "this operating system cannot bind processes to CPUs"
    return Note(
        setting="binder", value=binder, origin=request.origin("binder"), reason=request.reasons.get("binder", reason)
    )


def _binding_warnings(host: Host, request: LaunchRequest) -> tuple[str, ...]:
    if host.can_bind or request.settings.binder == "none":
        return ()
    return ("binding is not supported on this operating system: threads are limited, CPUs are not chosen",)
