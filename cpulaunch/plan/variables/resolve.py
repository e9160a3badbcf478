"""Environment variables: who wants which value, and who wins.

Order: --env and flags, the user's environment, a profile's own variables, a profile's settings, defaults.
"""

from __future__ import annotations

from cpulaunch.records.plan import Note
from cpulaunch.records.record import record
from cpulaunch.records.request import LaunchRequest, Origin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@record
class VariableRequest:
    """A value that a setting gives a variable; None unsets it. `per_worker` has one value for each instead.

    `shown` stands for a value that nobody wants to read.
    """

    name: str
    value: str | None
    origin: Origin
    reason: str
    per_worker: tuple[str, ...] = ()
    shown: str | None = None


@record
class Environment:
    """The changes to make for every worker, those that differ between workers, and a note for each variable."""

    changes: tuple[tuple[str, str | None], ...]
    per_worker: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[Note, ...]


def resolve(
    request: LaunchRequest, variable_requests: Iterable[VariableRequest], *, replaced: frozenset[str] = frozenset()
) -> Environment:
    """The environment made of the user's assignments, a profile's variables and the variable requests of the plan.

    `replaced`: variables of the user's environment that do not count, because they cannot be meant.
    """
    users = {name: value for name, value in request.environ.items() if name not in replaced}
    ranked: dict[str, VariableRequest] = {}
    for variable in variable_requests:
        ranked.setdefault(variable.name, variable)
    for origin, default in request.profile_env:
        if ranked.get(default.name, _NOBODY).origin != "cli":
            ranked[default.name] = VariableRequest(
                name=default.name, value=default.value, origin=origin, reason=default.reason
            )
    for name, value in request.settings.env:
        ranked[name] = VariableRequest(name=name, value=value, origin="cli", reason="--env")
    winners = {name: _or_users(variable, users) for name, variable in ranked.items()}
    return Environment(
        changes=tuple(
            (name, variable.value)
            for name, variable in winners.items()
            if variable.origin != "environment"
            and not variable.per_worker
            and (variable.value, name in request.environ) != _NO_OP
        ),
        per_worker=tuple((name, variable.per_worker) for name, variable in winners.items() if variable.per_worker),
        notes=tuple(_note(variable) for variable in winners.values()),
    )


_NOBODY = VariableRequest(name="", value=None, origin="default", reason="")
_NO_OP = (None, False)
"""Unsetting what is not set."""


def _or_users(variable: VariableRequest, environ: Mapping[str, str]) -> VariableRequest:
    """The user's own variable where there is one, unless the command line says otherwise."""
    if variable.origin == "cli" or variable.name not in environ:
        return variable
    reason = "your environment sets it"
    wanted = distinct(variable.per_worker) if variable.per_worker else variable.value
    if wanted is not None and wanted != environ[variable.name]:
        reason += f"; otherwise {wanted} ({variable.reason})"
    return VariableRequest(name=variable.name, value=environ[variable.name], origin="environment", reason=reason)


def _note(variable: VariableRequest) -> Note:
    value = distinct(variable.per_worker) if variable.per_worker else variable.value
    if variable.shown is not None:
        value = variable.shown
    return Note(setting=variable.name, value=value, origin=variable.origin, reason=variable.reason)


def distinct(values: Sequence[str]) -> str:
    """The different values in their first order, at most four of them."""
    seen = list(dict.fromkeys(values))
    return ", ".join(seen[:4]) + (", …" if len(seen) > 4 else "")


def per_worker(
    name: str, values: Sequence[str], *, origin: Origin, reason: str, shown: str | None = None
) -> VariableRequest:
    """The request for one value per worker, a plain one if all are equal."""
    if len(set(values)) == 1:
        return VariableRequest(name=name, value=values[0], origin=origin, reason=reason, shown=shown)
    return VariableRequest(name=name, value=None, origin=origin, reason=reason, per_worker=tuple(values), shown=shown)
