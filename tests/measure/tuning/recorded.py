"""Searches replayed on tables: no program is launched."""

import itertools
import math
import random

from cpulaunch.measure.tuning.knowledge import first_configurations
from cpulaunch.measure.tuning.search import SearchSetup, best_trial, run_search
from cpulaunch.measure.tuning.space import Dimension
from cpulaunch.measure.tuning.study import Study
from cpulaunch.measure.tuning.tables import RecordedTable
from cpulaunch.measure.tuning.trial import Baseline, Guard

LEVELS = (
    {"graph": "onednn", "weights": "fp32", "channels_last": True},
    {"graph": "onednn", "weights": "bf16", "precision": "bf16", "channels_last": True},
    {"graph": "onednn", "weights": "int8", "precision": "bf16", "channels_last": True},
)
SPACE = (
    Dimension(name="weights", values=(None, "int8", "bf16", "fp32")),
    Dimension(name="graph", values=(None, "onednn")),
    Dimension(name="precision", values=(None, "bf16")),
    Dimension(name="threads", values=(None, 1)),
    Dimension(name="allocator", values=(None, "jemalloc", "default")),
    Dimension(name="wait_policy", values=(None, "passive")),
    Dimension(name="huge_pages", values=(None, True)),
)


def table(effects, *, noise=0.01, failures=None, space=SPACE, pairs=None):
    """A table of rates: by (setting, value) what multiplies them, as a logarithm; by (setting, value) failures."""
    draw = random.Random(1)
    samples = {}
    for values in itertools.product(*(dimension.values for dimension in space)):
        chosen = [(each.name, value) for each, value in zip(space, values, strict=True) if value is not None]
        total = sum(effects.get(each, 0.0) for each in chosen)
        total += sum((pairs or {}).get(pair, 0.0) for pair in itertools.combinations(chosen, 2))
        reason = next((failures[each] for each in chosen if each in (failures or {})), None)
        rates = tuple(100 * math.exp(total + draw.gauss(0, noise)) for _ in range(5))
        samples[frozenset(chosen)] = reason or rates
    return RecordedTable(name="table", space=space, lower_is_better=False, samples=samples)


def setup_for(recorded, *, seed=0, max_trials=12, launch=None, guard=None, notify=None, seconds_left=None):
    draw = random.Random(seed)
    return SearchSetup(
        space=recorded.space,
        launch=launch or (lambda configuration: recorded.launch(configuration, draw)),
        effect=lambda configuration: frozenset(configuration.items()),
        seconds_left=seconds_left or (lambda: 1.0),
        guard=guard or Guard(),
        lower_is_better=recorded.lower_is_better,
        max_trials=max_trials,
        notify=notify or (lambda trial, best: None),
    )


def replay(recorded, **options):
    """The trials of a search."""
    study = Study(None, recorded.space, seed=options.get("seed", 0))
    setup = setup_for(recorded, **options)
    try:
        first = first_configurations(recorded.space, levels=LEVELS, past=())
        run_search(setup, study, Baseline(), first)
        return study.trials()
    finally:
        study.close()


def share_of_best(recorded, trials):
    """The speed of the best trial, or of the default, as a share of the table's best."""
    best = best_trial(trials)
    found = recorded.median_speed({}) if best is None else recorded.median_speed(best.configuration)
    return max(found, recorded.median_speed({})) / recorded.best_speed
