"""The workers' environment: all variable requests, resolved against what the user set."""

from cpulaunch.plan.placement.instances import Placement
from cpulaunch.plan.placement.loaders import Loaders
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.plan.plugin.checks import TorchChoices
from cpulaunch.plan.plugin.settings import WorkerResources, compile_cache, plugin_variables, torch_settings
from cpulaunch.plan.variables.allocator import allocator_variables, compile_threads, huge_page_warnings
from cpulaunch.plan.variables.openmp import hazards, pinning, waiting
from cpulaunch.plan.variables.preloads import Preloads
from cpulaunch.plan.variables.resolve import Environment, VariableRequest, resolve
from cpulaunch.plan.variables.thread_variables import Compute
from cpulaunch.records.host import Host
from cpulaunch.records.plan import Note
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.torch_settings import OWN_VARIABLES

PLACES = ("CCL_LOCAL_RANK", "CCL_LOCAL_SIZE")
"""Variables that tell a rank its place: one that is inherited is another job's."""


@record(kw_only=False)
class Decisions:
    """What has been decided before the environment is made."""

    pool: Pool
    placement: Placement
    compute: Compute
    preloads: Preloads
    loaders: Loaders
    choices: TorchChoices
    bound: bool
    variable_requests: tuple[VariableRequest, ...]


@record(kw_only=False)
class Tuned:
    """The environment, and what to warn of."""

    environment: Environment
    warnings: tuple[str, ...]


def tune(host: Host, request: LaunchRequest, made: Decisions) -> Tuned:
    """The environment of the workers and the warnings it gives rise to."""
    preloads, compute = made.preloads, made.compute
    wait = waiting(request, preloads.runtime, shared_because(made))
    pins = pinning(
        request,
        preloads.runtime,
        made.placement.workers,
        bound=made.bound and made.pool.pinned and made.placement.exclusive,
        guarded=made.choices.plugin_missing_reason is None,
    )
    variable_requests = (
        *compute.variable_requests,
        VariableRequest(
            name="OMP_SCHEDULE", value="STATIC", origin="default", reason="equal chunks stay with their thread"
        ),
        *wait.variable_requests,
        *pins.variable_requests,
        *allocator_variables(request, preloads.allocator),
        compile_threads(host, compute.limits),
        *compile_cache(host, request, compute.threads),
        *made.variable_requests,
        *_plugin(host, request, made),
    )
    resolved = resolve(request, variable_requests, replaced=compute.malformed.union(OWN_VARIABLES, PLACES))
    return Tuned(
        _with_preloads(resolved, preloads),
        (
            *wait.warnings,
            *pins.warnings,
            *hazards(host, request, compute.threads),
            *made.choices.warnings,
            *huge_page_warnings(host, request),
        ),
    )


def _plugin(host: Host, request: LaunchRequest, made: Decisions) -> tuple[VariableRequest, ...]:
    """The variable that tells every worker's torch what to do."""
    seats = [
        WorkerResources(threads, worker.cpus if made.bound else frozenset(), loader_cpus)
        for threads, worker, loader_cpus in zip(
            made.compute.threads, made.placement.workers, made.loaders.cpus, strict=True
        )
    ]
    return plugin_variables(
        request,
        torch_settings(host, request, seats=seats, choices=made.choices, loaders=made.loaders, preloads=made.preloads),
    )


def shared_because(made: Decisions) -> str | None:
    """Why a worker's CPUs are not its own; None if they are."""
    if made.pool.quota_threads is not None or not made.pool.pinned:
        return "a CPU quota is in force"
    if not made.placement.exclusive:
        return "workers share cores"
    if any(count > limit for count, limit in zip(made.compute.threads, made.compute.limits, strict=True)):
        return "there are more threads than CPUs"
    if len(made.placement.workers) > 1 and not made.bound:
        return "the workers are not bound to CPUs of their own"
    return None


def _with_preloads(environment: Environment, preloads: Preloads) -> Environment:
    """The environment with the preload list, which holds the user's own too."""
    if preloads.ld_preload is None:
        return environment
    value, name = preloads.ld_preload, "LD_PRELOAD"
    note = Note(setting=name, value=value, origin=preloads.origin, reason=preloads.reason)
    return Environment(
        changes=(*(change for change in environment.changes if change[0] != name), (name, value)),
        per_worker=environment.per_worker,
        notes=(*(entry for entry in environment.notes if entry.setting != name), note),
    )
