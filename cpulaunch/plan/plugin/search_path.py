"""PYTHONPATH of workers whose Python does not have cpulaunch: the user's own, then the folder with the plugin."""

from __future__ import annotations

from cpulaunch.plan.variables.resolve import Environment
from cpulaunch.records.plan import Note
from cpulaunch.records.record import replace
from cpulaunch.records.request import LaunchRequest

NAME = "PYTHONPATH"
REASON = "torch finds cpulaunch's plugin there: the workers' Python does not have this cpulaunch"


def with_plugin_path(environment: Environment, request: LaunchRequest, folder: str) -> Environment:
    """The environment in which Python also looks for modules in `folder`, after the folders that the user names."""
    typed = any(name == NAME for name, _ in request.settings.env)
    own = tuple((name, _joined(values, folder)) for name, values in environment.per_worker if name == NAME)
    changed = [value for name, value in environment.changes if name == NAME]
    users = changed[0] if changed else None if typed else request.environ.get(NAME)
    value = f"{users}:{folder}" if users else folder
    note = Note(
        setting=NAME, value=value, origin="cli" if typed else "environment" if users else "default", reason=REASON
    )
    return replace(
        environment,
        per_worker=(*(each for each in environment.per_worker if each[0] != NAME), *own),
        changes=(*(each for each in environment.changes if each[0] != NAME), *(() if own else ((NAME, value),))),
        notes=(*(each for each in environment.notes if each.setting != NAME or own), *(() if own else (note,))),
    )


def _joined(values: tuple[str, ...], folder: str) -> tuple[str, ...]:
    return tuple(f"{value}:{folder}" for value in values)
