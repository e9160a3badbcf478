"""What it takes to start each worker, resolved and tried before anything starts."""

from __future__ import annotations

from cpulaunch.launch.process.bind import Binding, Notify, prepare_bindings
from cpulaunch.launch.process.program import child_environ, find_executable
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.record import fields, record
from cpulaunch.records.torch_settings import EVENTS_VARIABLE, VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

NOT_INHERITED = ((VARIABLE, None), (EVENTS_VARIABLE, None), ("CPULAUNCH_WORKER_PID", None))
"""What an outer launch told its own workers; the last is MARK of worker/origin.py."""


@record
class ExecSpec:
    """One worker: what to execute, with which environment, bound to what."""

    worker: int
    path: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    binding: Binding


def with_variables(spec: ExecSpec, variables: Mapping[str, str]) -> ExecSpec:
    """The start with these variables set as well."""
    values = {name: getattr(spec, name) for name in fields(ExecSpec)}
    return ExecSpec(**values | {"environ": {**spec.environ, **variables}})


def prepare_exec_specs(plan: LaunchPlan, environ: Mapping[str, str], *, notify: Notify) -> tuple[ExecSpec, ...]:
    """A start for each worker, its command found in its own PATH, its binding tried out.

    Raises: NotFoundError, NotExecutableError, LaunchError.
    """
    environments = [child_environ(environ, (*NOT_INHERITED, *worker.env)) for worker in plan.workers]
    paths = [find_executable(worker.argv[0], env) for worker, env in zip(plan.workers, environments, strict=True)]
    bindings = prepare_bindings(plan, notify=notify)
    return tuple(
        ExecSpec(worker=worker.index, path=path, argv=worker.argv, environ=env, binding=binding)
        for worker, path, env, binding in zip(plan.workers, paths, environments, bindings, strict=True)
    )
