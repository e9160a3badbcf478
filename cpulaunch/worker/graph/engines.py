"""The engines of `--graph`: oneDNN Graph, inductor and zentorch."""

from __future__ import annotations

import os

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.fusion.trials import Trials
from cpulaunch.worker.graph.cache import Captures
from cpulaunch.worker.graph.capture import capture
from cpulaunch.worker.graph.onednn import after_fork
from cpulaunch.worker.graph.precision import Precision


def captures(settings: TorchSettings, precision: Precision) -> Captures:
    """An empty cache of captures, made by the engine that the settings name."""
    if settings.graph == "onednn":
        trials = Trials(settings.graph_budget)
        made = Captures(settings, lambda call, eager, weights: capture(call, eager, weights, precision, trials))
        if hasattr(os, "register_at_fork"):  # Not on Windows.
            for renew in (made.after_fork, trials.after_fork, after_fork):
                os.register_at_fork(after_in_child=renew)
        return made
    from cpulaunch.worker.graph.compiled import Compiler

    return Captures(settings, Compiler(settings, precision).capture)
