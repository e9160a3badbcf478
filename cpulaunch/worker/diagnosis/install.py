"""Installs the hooks of a diagnosis, in a worker and in every process that it starts."""

from __future__ import annotations

import os

from cpulaunch.records.torch_settings import DIAGNOSIS_VARIABLE, TorchSettings, decode_request
from cpulaunch.worker.diagnosis import hooks
from cpulaunch.worker.diagnosis.session import Session


def install(settings: TorchSettings) -> str:
    """Effect: the steps of this process, and of those that it forks, are measured. Raises: ValueError, TypeError."""
    session = Session(decode_request(os.environ[DIAGNOSIS_VARIABLE]), settings.index)
    activity = session.activity
    hooks.hook_modules(activity, session.ended)
    hooks.hook_optimizers(activity, session.ended)
    hooks.hook_backward(activity, session.ended)
    hooks.hook_loaders(activity, session.ended, session.fetched)
    hooks.hook_collectives(activity)
    hooks.hook_profilers(session.before_profiler)
    session.loaded()
    os.register_at_fork(after_in_child=session.reset)
    return "steps are measured"
