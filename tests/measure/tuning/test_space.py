"""The space: what can matter on a machine and for a program, what --vary and --fix do, and numerics."""

import pytest

from cpulaunch.measure.tuning.knowledge import first_configurations, neighbours
from cpulaunch.measure.tuning.space import (
    Dimension,
    SpaceChoice,
    candidates,
    options_of,
    parse_fixed,
    parse_variation,
    search_space,
    within,
)
from cpulaunch.probe import Root, probe_host
from cpulaunch.records.errors import UsageError

HOST = probe_host(Root("/"))
CHANGES_NUMBERS = {
    *("graph", "weights", "precision", "channels_last", "fused_optimizers", "flush_denormal", "dataloader_workers")
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
    assert "persistent_workers" in space()
    assert "persistent_workers" not in space(source="import torch")
    assert "persistent_workers" in space(source=None)


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
    [{"vary": parse_variation("graph")}, {"fixed": frozenset({"threads"}), "vary": parse_variation("threads=1")}],
)
def test_an_empty_space_is_an_error(choice):
    with pytest.raises(UsageError, match="nothing to tune"):
        space(**choice)


def test_a_setting_without_known_values_needs_some():
    with pytest.raises(UsageError, match="--vary needs values"):
        space(vary=parse_variation("interop_threads"))


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
