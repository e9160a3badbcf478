"""The space: what can matter on a machine and for a program, what --vary and --fix do, and numerics."""

import pytest

from cpulaunch.measure.tuning.knowledge import first_configurations, neighbours
from cpulaunch.measure.tuning.space import (
    ENVIRONMENT,
    Dimension,
    SpaceChoice,
    candidates,
    least_error,
    options_of,
    parse_fixed,
    parse_variation,
    script_source,
    search_space,
    within,
)
from cpulaunch.probe import Root, probe_host
from cpulaunch.records.errors import UsageError
from cpulaunch.records.settings import setting_specs

HOST = probe_host(Root("/"))
CHANGES_NUMBERS = {
    *("graph", "weights", "precision", "channels_last", "fused_optimizers", "flush_denormal"),
    *("dataloader_workers", "persistent_workers", "inference_mode"),
}
SOURCE = "import torch; conv; DataLoader; torch.optim"


def space(*, dimensions=None, source=SOURCE, effect=None, **choice):
    wanted = SpaceChoice(**{"vary": {}, "fixed": frozenset(), **choice})
    found = search_space(
        dimensions or candidates(HOST), wanted, source=source, effect=effect or (lambda each: frozenset(each.items()))
    )
    return {each.name: each.values for each in found}


def test_without_an_allowed_error_nothing_changes_numbers():
    found = space()
    assert not CHANGES_NUMBERS & found.keys()
    assert {"allocator", "wait_policy"} <= found.keys()


@pytest.mark.parametrize(
    ("max_error", "weights"),
    [(0.0, None), (1e-5, ("fp32",)), (1e-3, ("bf16", "fp32")), (1e-2, ("int8", "bf16", "fp32", "int4"))],
)
def test_an_allowed_error_adds_what_may_stay_within_it(max_error, weights):
    dimension = Dimension(name="weights", values=(None, "int8", "bf16", "fp32", "int4"))
    found = space(dimensions=(dimension, Dimension(name="smt", values=(None, True))), max_error=max_error)
    assert found.get("weights") == (weights and (None, *weights))


def test_settings_for_what_a_script_does_not_have_are_left_out():
    assert "persistent_workers" in space(max_error=1e-3)
    assert "persistent_workers" not in space(source="import torch", max_error=1e-3)
    assert "persistent_workers" in space(source=None, max_error=1e-3)


def test_values_that_change_nothing_here_are_left_out():
    def effect(configuration):
        if configuration.get("allocator") == "mimalloc":
            return None
        return frozenset(each for each in configuration.items() if each not in (("wait_policy", "active"),))

    found = space(effect=effect)
    assert found["wait_policy"] == (None, "passive")
    assert found["allocator"] == (None, "tcmalloc", "jemalloc", "default")


def test_vary_and_fix():
    assert space(vary=parse_variation("threads=1,3")) == {"threads": (None, 1, 3)}
    assert set(space(vary=parse_variation("allocator,wait-policy"))) == {"allocator", "wait_policy"}
    assert "allocator" not in space(fixed=parse_fixed("--allocator"))
    assert space(vary=parse_variation("huge-pages=on")) == {"huge_pages": (None, True)}


@pytest.mark.parametrize("text", ["nonsense", "threads=x", "huge_pages=maybe", "threads=0", "=1"])
def test_what_no_setting_takes_is_refused(text):
    with pytest.raises(UsageError):
        parse_variation(text)


@pytest.mark.parametrize(
    "choice",
    [
        {"vary": parse_variation("huge_pages=off"), "effect": lambda each: None if each else ()},
        {"fixed": frozenset({"threads"}), "vary": parse_variation("threads=1")},
    ],
)
def test_an_empty_space_is_an_error(choice):
    with pytest.raises(UsageError, match="nothing to tune"):
        space(**choice)


def test_a_setting_without_known_values_needs_some():
    with pytest.raises(UsageError, match="--vary needs values"):
        space(vary=parse_variation("interop_threads"))


def test_every_setting_that_is_not_known_to_compute_the_same_needs_an_allowed_error():
    others = setting_specs().keys() - ENVIRONMENT
    assert all(least_error(name, "a new value") > 0 for name in others)
    assert setting_specs().keys() >= ENVIRONMENT
    assert not CHANGES_NUMBERS & ENVIRONMENT


@pytest.mark.parametrize(
    ("text", "enough"),
    [
        *[("optimize=2", 1e-6), ("optimize=2,4", 3e-3), ("ipex=on", 1e-6), ("compile-mode=max-autotune", 1e-6)],
        *[("weights=fp32,int4", 1e-2), ("precision=bf16", 1e-3), ("graph", 1e-6), ("persistent_workers=on", 1e-6)],
    ],
)
def test_what_vary_names_is_refused_rather_than_left_out(text, enough):
    vary = {**parse_variation("threads=1"), **parse_variation(text)}
    for too_small in (None, enough / 10):
        with pytest.raises(UsageError, match=r"--max-error .*, or more"):
            space(vary=vary, max_error=too_small)
    assert len(space(vary=vary, max_error=enough)) == 2
    with pytest.raises(UsageError, match=f"--max-error {enough:g}, or more"):
        space(vary=vary)


@pytest.mark.parametrize(
    ("text", "needed"),
    [("instances=1,2", "--throughput"), ("cores-per-instance=1", "--throughput"), ("nproc-per-node=2", "--dist")],
)
def test_numbers_of_instances_and_ranks_need_the_option_that_makes_their_figures_comparable(text, needed):
    vary = parse_variation(text)
    with pytest.raises(UsageError, match=needed):
        space(vary=vary)
    assert len(space(vary=vary, goals=frozenset({needed}))) == 1


SMALL = (Dimension(name="graph", values=(None, "onednn")), Dimension(name="threads", values=(None, 1, 2)))


def test_options_and_neighbours():
    assert options_of({"graph": "onednn", "huge_pages": True}) == ("--graph", "onednn", "--huge-pages")
    assert list(neighbours({"threads": 1}, SMALL)) == [{"graph": "onednn", "threads": 1}, {}, {"threads": 2}]
    assert within({"threads": 1, "graph": "onednn"}, SMALL) == {"graph": "onednn", "threads": 1}
    assert within({"threads": 7}, SMALL) is None


def test_what_is_known_comes_first():
    found = first_configurations(
        SMALL,
        levels=[{"graph": "onednn", "weights": "fp32"}, {"graph": "onednn"}, {"weights": "int8"}],
        past=[{"threads": 2}, {"threads": 9}, {"threads": 2}],
    )
    assert found == ({}, {"threads": 2}, {"graph": "onednn"})


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("import torch, numpy as np\nfrom os.path import join\n", True),
        ("import torch.nn as nn; from torch import optim\n", True),
        ("import torch, models\n", False),
        ("import torch; import models\n", False),
        ("import torch, \\\n    models\n", False),
        ("import torch, \\\n    numpy\n", True),
        ("def f():\n    import torch.nn, models.vision as vision\n", False),
        ("from .models import build\n", False),
        ("from . import models\n", False),
        ("", False),
    ],
)
def test_a_script_that_imports_modules_of_others_does_not_show_all(text, is_whole):
    assert script_source(text.encode()) == (text if is_whole else None)
