"""What to execute for each worker, found and tried before any worker starts."""

from __future__ import annotations

from cpulaunch.launch.process.bind import Binding, Notify, prepare_bindings
from cpulaunch.launch.process.program import child_environ, find_executable
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.record import record, replace
from cpulaunch.records.torch_settings import EVENTS_VARIABLE, VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

NOT_INHERITED = ((VARIABLE, None), (EVENTS_VARIABLE, None), ("CPULAUNCH_WORKER_PID", None))
"""Variables of an outer launch, unset for the workers. The last is MARK of worker/reporting/process_identity.py."""


@record
class ExecSpec:
    """One worker: the program to execute, its arguments, environment and binding."""

    worker: int
    path: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    binding: Binding


def with_variables(spec: ExecSpec, variables: Mapping[str, str]) -> ExecSpec:
    """The spec with these environment variables set as well."""
    return replace(spec, environ={**spec.environ, **variables})


def prepare_exec_specs(plan: LaunchPlan, environ: Mapping[str, str], *, notify: Notify) -> tuple[ExecSpec, ...]:
    """One spec for each worker: the command as found in the worker's own PATH, the binding as tried on this process.

    Raises: NotFoundError, NotExecutableError, LaunchError.
    """
    environments = [child_environ(environ, (*NOT_INHERITED, *worker.env)) for worker in plan.workers]
    paths = [find_executable(worker.argv[0], env) for worker, env in zip(plan.workers, environments, strict=True)]
    bindings = prepare_bindings(plan, notify=notify)
    return tuple(
        ExecSpec(worker=worker.index, path=path, argv=worker.argv, environ=env, binding=binding)
        for worker, path, env, binding in zip(plan.workers, paths, environments, bindings, strict=True)
    )
