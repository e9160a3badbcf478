"""Environment variables: which request for each one applies.

Order of precedence: --env and flags, the user's environment, a profile's own variables, a profile's settings, defaults.
"""

from __future__ import annotations

from cpulaunch.records.plan import Note, VariableRequest
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest, Origin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


@record
class Environment:
    """The changes to make for every worker, those that differ between workers, and a note for each variable."""

    changes: tuple[tuple[str, str | None], ...]
    per_worker: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...] = ()

    def of_worker(self, index: int) -> tuple[tuple[str, str | None], ...]:
        """All changes for one worker; None unsets a variable."""
        return (*((name, values[index]) for name, values in self.per_worker), *self.changes)


def resolve(
    request: LaunchRequest,
    requests: Iterable[VariableRequest],
    *,
    replaced: frozenset[str] = frozenset(),
    expand: Sequence[Callable[[str], str]] = (),
) -> Environment:
    """The environment made of --env, the user's environment, a profile's variables and the requests of settings.

    The first request for a variable counts. `replaced`: variables whose value in the user's environment is ignored.
    `expand`: for each worker, what makes its own value of one that --env sets; empty: all have the value as typed.
    """
    users = {name: value for name, value in request.environ.items() if name not in replaced}
    chosen: dict[str, VariableRequest] = {}
    for variable in requests:
        chosen.setdefault(variable.name, variable)
    for origin, default in request.profile_env:
        if default.name not in chosen or chosen[default.name].origin != "cli":
            chosen[default.name] = VariableRequest(
                name=default.name, value=default.value, origin=origin, reason=default.reason
            )
    for name, value in request.settings.env:
        values = [own(value) for own in expand] or [value]
        chosen[name] = per_worker(name, values, origin="cli", reason="--env")
    applied = [_or_users(variable, users) for variable in chosen.values()]
    return Environment(
        changes=tuple((each.name, each.value) for each in applied if _changes(each, request.environ)),
        per_worker=tuple((each.name, each.per_worker) for each in applied if each.per_worker),
        notes=tuple(_note(each) for each in applied),
    )


def _changes(variable: VariableRequest, environ: Mapping[str, str]) -> bool:
    """Whether every worker's environment changes in the same way; unsetting what is not set is no change."""
    if variable.origin == "environment" or variable.per_worker:
        return False
    return variable.value is not None or variable.name in environ


def _or_users(variable: VariableRequest, environ: Mapping[str, str]) -> VariableRequest:
    """The value in the user's environment where there is one, unless the command line requests another."""
    if variable.origin == "cli" or variable.name not in environ:
        return variable
    reason = "your environment sets it"
    otherwise = _value(variable)
    if otherwise is not None and otherwise != environ[variable.name]:
        reason += f"; cpulaunch would set {otherwise} ({variable.reason})"
    return VariableRequest(name=variable.name, value=environ[variable.name], origin="environment", reason=reason)


def _value(variable: VariableRequest) -> str | None:
    return distinct(variable.per_worker) if variable.per_worker else variable.value


def _note(variable: VariableRequest) -> Note:
    value = _value(variable) if variable.shown is None else variable.shown
    return Note(setting=variable.name, value=value, origin=variable.origin, reason=variable.reason)


def distinct(values: Sequence[str]) -> str:
    """The different values in the order of their first appearance, at most four of them."""
    seen = list(dict.fromkeys(values))
    return ", ".join(seen[:4]) + (", …" if len(seen) > 4 else "")


def per_worker(
    name: str, values: Sequence[str], *, origin: Origin, reason: str, shown: str | None = None
) -> VariableRequest:
    """The request for one value per worker, in order; a request for one value if all are equal."""
    if len(set(values)) == 1:
        return VariableRequest(name=name, value=values[0], origin=origin, reason=reason, shown=shown)
    return VariableRequest(name=name, value=None, origin=origin, reason=reason, per_worker=tuple(values), shown=shown)
