"""The workers' environment: the variable requests of all decisions, resolved against what the user set."""

from __future__ import annotations

from cpulaunch.plan.placement.instances import HostWorkers, Placement
from cpulaunch.plan.placement.loaders import Loaders
from cpulaunch.plan.placement.memory import Memory
from cpulaunch.plan.placement.pool import Pool
from cpulaunch.plan.plugin.checks import Collectives, TorchChoices
from cpulaunch.plan.plugin.settings import plugin_variables, torch_settings
from cpulaunch.plan.variables.allocator import allocator_variables, compile_threads, huge_page_warnings
from cpulaunch.plan.variables.openmp import affinity_variables, hazard_warnings, wait_variables
from cpulaunch.plan.variables.preloads import Preloads
from cpulaunch.plan.variables.resolve import Environment, resolve
from cpulaunch.plan.variables.thread_variables import ThreadPlan
from cpulaunch.records.host import Host
from cpulaunch.records.plan import Note, VariableRequest, WorkerPlan
from cpulaunch.records.record import record, replace
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.torch_settings import INSTANCE_VARIABLES, OWN_VARIABLES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.plan.instance_identity import Instance

LOCAL_RANK_VARIABLES = ("CCL_LOCAL_RANK", "CCL_LOCAL_SIZE")
"""oneCCL's variables for a rank's position on its host: inherited ones describe another job."""


@record
class Decisions:
    """What the planner decides before the environment.

    `bound`: workers are confined to their CPUs. `owned`: those CPUs are theirs alone, and no quota limits them.
    """

    pool: Pool
    workers: HostWorkers
    bound: bool
    owned: bool
    loaders: Loaders
    collectives: Collectives
    threads: ThreadPlan
    memory: Memory
    preloads: Preloads
    instances: tuple[Instance, ...] = ()
    """Of a launch of instances: what distinguishes them."""

    @property
    def placement(self) -> Placement:
        """The CPUs that each worker computes on."""
        return self.collectives.placement

    @property
    def choices(self) -> TorchChoices:
        """The settings inside torch."""
        return self.collectives.choices


def assemble_environment(
    host: Host, request: LaunchRequest, decisions: Decisions, workers: Sequence[WorkerPlan]
) -> Environment:
    """The changes to the environment of all workers of this host, with their notes and warnings."""
    preloads, threads, choices = decisions.preloads, decisions.threads, decisions.choices
    waiting = wait_variables(request, preloads.runtime, _shared_cpus_reason(decisions))
    affinity = affinity_variables(
        request,
        preloads.runtime,
        decisions.placement.workers,
        owned=decisions.owned,
        plugin=choices.plugin_missing_reason is None,
    )
    settings = torch_settings(
        host, request, workers=workers, choices=choices, loaders=decisions.loaders, preloads=preloads
    )
    requests = (
        *threads.variable_requests,
        _SCHEDULE,
        *waiting.variable_requests,
        *affinity.variable_requests,
        *allocator_variables(request, preloads.allocator),
        compile_threads(host, threads.cpu_limits),
        *decisions.workers.variable_requests,
        *decisions.collectives.variable_requests,
        *plugin_variables(request, settings),
        *_identity_variables(decisions),
    )
    inherited = threads.malformed.union(OWN_VARIABLES, LOCAL_RANK_VARIABLES, INSTANCE_VARIABLES)
    expand = [instance.expand for instance in decisions.instances]
    environment = resolve(request, requests, replaced=inherited, expand=expand)
    return replace(
        _with_plugin_path(_with_preloads(environment, preloads), host, request),
        warnings=(
            *waiting.warnings,
            *affinity.warnings,
            *hazard_warnings(host, request, threads.counts),
            *choices.warnings,
            *huge_page_warnings(host, request),
        ),
    )


def _identity_variables(decisions: Decisions) -> tuple[VariableRequest, ...]:
    if not decisions.instances:
        return ()
    from cpulaunch.plan.instance_identity import identity_variables

    return identity_variables(decisions.instances)


_SCHEDULE = VariableRequest(
    name="OMP_SCHEDULE",
    value="STATIC",
    origin="default",
    reason="each thread keeps its share of a loop",
)


def _shared_cpus_reason(decisions: Decisions) -> str | None:
    """Why threads of a worker compete for its CPUs with others; None if they do not."""
    threads = decisions.threads
    if decisions.pool.quota_threads is not None or not decisions.pool.pinned:
        return "a CPU quota is in force"
    if not decisions.placement.exclusive:
        return "workers share cores"
    if any(count > limit for count, limit in zip(threads.counts, threads.cpu_limits, strict=True)):
        return "there are more threads than CPUs"
    if len(decisions.placement.workers) > 1 and not decisions.bound:
        return "the workers are not bound to CPUs of their own"
    return None


def _with_plugin_path(environment: Environment, host: Host, request: LaunchRequest) -> Environment:
    if host.plugin_path is None:
        return environment
    from cpulaunch.plan.plugin.search_path import with_plugin_path  # Only for a Python that lacks cpulaunch.

    return with_plugin_path(environment, request, host.plugin_path)


def _with_preloads(environment: Environment, preloads: Preloads) -> Environment:
    """The environment with the preload list, which includes the user's own."""
    if preloads.ld_preload is None:
        return environment
    value, name = preloads.ld_preload, "LD_PRELOAD"
    note = Note(setting=name, value=value, origin=preloads.origin, reason=preloads.reason)
    return replace(
        environment,
        changes=(*(change for change in environment.changes if change[0] != name), (name, value)),
        notes=(*(entry for entry in environment.notes if entry.setting != name), note),
    )
