"""The engines of `--graph`: oneDNN Graph, inductor and zentorch."""

from __future__ import annotations

from typing import Any

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.fusion.trials import Trials
from cpulaunch.worker.graph.cache import Captures
from cpulaunch.worker.graph.capture import Call, Captured, capture
from cpulaunch.worker.graph.precision import Precision
from cpulaunch.worker.graph.weights import Weights


def captures(settings: TorchSettings, precision: Precision) -> Captures:
    """An empty cache of captures, made by the engine that the settings name."""
    if settings.graph == "onednn":
        trials = Trials(settings.graph_budget)
        return Captures(settings, lambda call, eager, weights: capture(call, eager, weights, precision, trials))
    from cpulaunch.worker.graph.compiled import Compiler

    compiler = Compiler(settings, precision)

    def engine(call: Call, eager: Any, weights: Weights) -> Captured:
        return compiler.capture(call, eager)

    return Captures(settings, engine)
