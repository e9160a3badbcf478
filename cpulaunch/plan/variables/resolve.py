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
class Wish:
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


def resolve(request: LaunchRequest, wishes: Iterable[Wish], *, replaced: frozenset[str] = frozenset()) -> Environment:
    """The environment made of the user's assignments, a profile's variables and the planner's wishes.

    `replaced`: variables of the user's environment that do not count, because they cannot be meant.
    """
    users = {name: value for name, value in request.environ.items() if name not in replaced}
    ranked: dict[str, Wish] = {}
    for wish in wishes:
        ranked.setdefault(wish.name, wish)
    for origin, default in request.profile_env:
        if ranked.get(default.name, _NOBODY).origin != "cli":
            ranked[default.name] = Wish(name=default.name, value=default.value, origin=origin, reason=default.reason)
    for name, value in request.settings.env:
        ranked[name] = Wish(name=name, value=value, origin="cli", reason="--env")
    winners = {name: _or_users(wish, users) for name, wish in ranked.items()}
    return Environment(
        changes=tuple(
            (name, wish.value)
            for name, wish in winners.items()
            if wish.origin != "environment" and not wish.per_worker and (wish.value, name in request.environ) != _NO_OP
        ),
        per_worker=tuple((name, wish.per_worker) for name, wish in winners.items() if wish.per_worker),
        notes=tuple(_note(wish) for wish in winners.values()),
    )


_NOBODY = Wish(name="", value=None, origin="default", reason="")
_NO_OP = (None, False)
"""Unsetting what is not set."""


def _or_users(wish: Wish, environ: Mapping[str, str]) -> Wish:
    """The user's own variable where there is one, unless the command line says otherwise."""
    if wish.origin == "cli" or wish.name not in environ:
        return wish
    reason = "your environment sets it"
    wanted = distinct(wish.per_worker) if wish.per_worker else wish.value
    if wanted is not None and wanted != environ[wish.name]:
        reason += f"; otherwise {wanted} ({wish.reason})"
    return Wish(name=wish.name, value=environ[wish.name], origin="environment", reason=reason)


def _note(wish: Wish) -> Note:
    value = distinct(wish.per_worker) if wish.per_worker else wish.value
    if wish.shown is not None:
        value = wish.shown
    return Note(setting=wish.name, value=value, origin=wish.origin, reason=wish.reason)


def distinct(values: Sequence[str]) -> str:
    """The different values in their first order, at most four of them."""
    seen = list(dict.fromkeys(values))
    return ", ".join(seen[:4]) + (", …" if len(seen) > 4 else "")


def per_worker(name: str, values: Sequence[str], *, origin: Origin, reason: str, shown: str | None = None) -> Wish:
    """The wish for one value per worker, a plain one if all are equal."""
    if len(set(values)) == 1:
        return Wish(name=name, value=values[0], origin=origin, reason=reason, shown=shown)
    return Wish(name=name, value=None, origin=origin, reason=reason, per_worker=tuple(values), shown=shown)
