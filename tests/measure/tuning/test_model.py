"""The model of settings' effects: which of them made the difference between trials."""

import math
import random

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")

from cpulaunch.measure.tuning.model import importance
from cpulaunch.measure.tuning.space import Dimension
from cpulaunch.measure.tuning.study import TuningTrial
from cpulaunch.records.record import replace

SPACE = (
    Dimension(name="weights", values=(None, "int8")),
    Dimension(name="graph", values=(None, "onednn")),
    Dimension(name="threads", values=(None, 1)),
    Dimension(name="allocator", values=(None, "jemalloc")),
)


def trials(*results):
    return [
        TuningTrial(number=number, configuration=configuration, ratio=ratio, facts={})
        for number, (ratio, configuration) in enumerate(results)
    ]


GENERATION = trials(
    (2.97, {"weights": "int8"}),
    (1.03, {"graph": "onednn"}),
    (1.55, {"weights": "int8", "threads": 1}),
    (2.55, {"weights": "int8", "graph": "onednn"}),
    (2.95, {"weights": "int8", "allocator": "jemalloc"}),
    (3.10, {"weights": "int8", "graph": "onednn", "allocator": "jemalloc"}),
)
"""A search for a text generation, which reads weights all the time."""


def test_the_setting_that_made_the_difference_is_the_most_important():
    found = importance(SPACE, GENERATION)
    assert max(found, key=found.get) == "weights"
    assert found["weights"] > 0.5 > 0.1 > found["allocator"]
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-3)


def test_failed_trials_say_nothing_of_importance():
    failed = trials(*[(None, {"graph": "onednn"})] * 4)
    assert importance(SPACE, [*GENERATION, *failed]) == importance(SPACE, GENERATION)


def test_few_trials_or_equal_ones_say_nothing_of_importance():
    assert importance(SPACE, GENERATION[:3]) == {}
    again = [replace(each, facts={"same_as": 0}) for each in GENERATION[:3]]
    assert importance(SPACE, [*GENERATION[:3], *again, *trials((1.0, {}))]) == {}
    assert importance(SPACE, trials(*[(1.0, each.configuration) for each in GENERATION])) == {}


@pytest.mark.parametrize("seed", range(5))
def test_differences_that_are_but_noise_say_nothing_of_importance(seed):
    noise = random.Random(seed)
    assert (
        importance(SPACE, trials(*[(math.exp(noise.gauss(0, 0.005)), each.configuration) for each in GENERATION])) == {}
    )


def test_values_that_were_not_tried_make_a_setting_no_less_important():
    space = (Dimension(name="weights", values=(None, "int8", "bf16", "fp32", "int4")), *SPACE[1:])
    tried = ({"weights": "int8"}, {"graph": "onednn"})
    found = importance(space, trials(*[(2.0, {**each, **more}) for each in tried for more in ({}, {"threads": 1})]))
    assert found["weights"] == pytest.approx(found["graph"], abs=0.02)


def test_settings_that_matter_only_together_share_the_importance():
    found = importance(
        SPACE,
        trials(
            (1.0, {"weights": "int8"}),
            (1.0, {"graph": "onednn"}),
            (1.0, {"threads": 1}),
            (2.0, {"weights": "int8", "graph": "onednn"}),
        ),
    )
    assert found["weights"] == pytest.approx(found["graph"])
    assert found["weights"] > 0.4


NAMES = (
    "weights",
    "graph",
    "precision",
    "threads",
    "instances",
    "smt",
    "allocator",
    "affinity",
    "openmp",
    "huge_pages",
)


@pytest.mark.parametrize("count", [6, 12])
def test_noise_makes_no_setting_of_a_wide_space_important(count):
    space = tuple(Dimension(name=name, values=(None, "other")) for name in NAMES)
    named = 0
    for seed in range(40):
        noise = random.Random(seed)
        tried = [{name: "other" for name in noise.sample(NAMES, noise.choice((1, 1, 2)))} for _ in range(count)]
        named += bool(importance(space, trials(*[(math.exp(noise.gauss(0, 0.03)), each) for each in tried])))
    assert named <= 6, "of 40 searches"


def test_a_small_effect_that_was_measured_often_is_important():
    space = (Dimension(name="allocator", values=(None, "jemalloc")), Dimension(name="affinity", values=(None, "close")))
    noise = random.Random(1)
    results = [(1.055 * math.exp(noise.gauss(0, 0.03)), {"allocator": "jemalloc"}) for _ in range(20)]
    results += [(math.exp(noise.gauss(0, 0.03)), {"affinity": "close"}) for _ in range(20)]
    assert importance(space, trials(*results)) == {"allocator": 1.0, "affinity": 0.0}
