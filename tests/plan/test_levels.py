"""Optimization levels as a table: which settings each stands for on a machine, below and above which others."""

import pytest

from cpulaunch.plan.levels import level_values, with_level
from cpulaunch.plan.planner import make_plan
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan, Note
from cpulaunch.records.request import EnvDefault, Layer, merge
from cpulaunch.records.torch_settings import VARIABLE, decode
from tests.plan.machines import SCRIPT, TORCH, libraries, machine, replace
from tests.roots import EPYC, GRACE, XEON, RootSpec, X86Cpu, host_of

OLD = X86Cpu(flags="fpu sse2 avx2 fma avx512f")
ZEN = replace(host_of(RootSpec(cpu=EPYC)), torch=TORCH)
PLAIN = replace(host_of(RootSpec(cpu=OLD)), torch=TORCH)
WITH_AMX = replace(host_of(RootSpec(cpu=XEON)), torch=TORCH)
WITHOUT_AMX = replace(host_of(RootSpec(cpu=X86Cpu(flags="fpu sse2 avx2 fma avx512f avx512_bf16"))), torch=TORCH)
ARM = replace(host_of(RootSpec(cpu=GRACE)), torch=TORCH)
UNKNOWN = replace(machine(cores=4), torch=TORCH)

ROUNDING = {"graph": "onednn", "weights": "fp32", "channels_last": True}
BF16 = {"graph": "onednn", "weights": "bf16", "channels_last": True, "precision": "bf16"}
NO_PRELOADS = {"openmp": "default", "allocator": "default", "mkl_dispatch": "off"}


@pytest.mark.parametrize(
    ("host", "level", "expected"),
    [
        *((host, 0, NO_PRELOADS) for host in (ZEN, PLAIN, ARM, UNKNOWN)),
        *((host, 1, {}) for host in (ZEN, PLAIN, ARM, UNKNOWN)),
        *((host, 2, ROUNDING) for host in (ZEN, PLAIN, ARM, UNKNOWN)),
        (ZEN, 3, BF16),
        (ARM, 3, BF16),
        (PLAIN, 3, ROUNDING),
        (WITHOUT_AMX, 3, ROUNDING | {"weights": "bf16"}),
        (WITHOUT_AMX, 4, ROUNDING | {"weights": "int8"}),
        (WITH_AMX, 3, BF16),
        (UNKNOWN, 3, ROUNDING),
        (ZEN, 4, BF16 | {"weights": "int8"}),
        (ARM, 4, BF16 | {"weights": "int8"}),
        (PLAIN, 4, ROUNDING | {"weights": "int8"}),
    ],
)
def test_a_level_stands_for_settings(host: Host, level: int, expected: dict[str, object]) -> None:
    assert level_values(level, host) == expected


def cli(**values: object) -> Layer:
    return Layer(origin="cli", values=values)


def planned(host: Host, *layers: Layer, environ: dict[str, str] | None = None) -> LaunchPlan:
    merged, names = with_level(layers, host)
    return make_plan(host, merge(merged, program=SCRIPT, profile=names, environ=environ or {}))


def note(made: LaunchPlan, setting: str) -> Note:
    (found,) = [entry for entry in made.notes if entry.setting == setting]
    return found


def shown(made: LaunchPlan, setting: str) -> tuple[str | None, str]:
    return note(made, setting).value, note(made, setting).origin


NAMED = Layer(origin="profile:mine", values={"graph": "inductor", "allocator": "jemalloc"}, reasons={"graph": "why"})
AUTO = Layer(origin="profile:server", values={"openmp": "auto", "weights": "int4"}, automatic=True)


def test_every_setting_of_a_level_names_it_as_its_origin() -> None:
    made = planned(ZEN, cli(optimize=3))
    assert shown(made, "optimize") == ("3", "cli")
    for name, value in (("graph", "onednn"), ("weights", "bf16"), ("precision", "bf16"), ("channels_last", "on")):
        assert shown(made, name) == (value, "cli -O3")
        assert note(made, name).reason
    assert not made.warnings


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((cli(optimize=3),), True),
        ((Layer(origin="profile:mine", values={"optimize": 3}),), True),
        ((cli(precision="bf16"),), False),
        ((cli(optimize=3, precision="bf16"),), False),
        ((cli(optimize=3), Layer(origin="profile:mine", values={"precision": "bf16"})), False),
    ],
)
def test_the_worker_is_told_whether_a_level_chose_the_precision(layers: tuple[Layer, ...], expected: bool) -> None:
    settings = decode(dict(planned(ZEN, *layers).workers[0].env)[VARIABLE] or "")
    assert (settings.precision, settings.level_precision) == ("bf16", expected)


def test_what_the_user_names_wins_over_a_level_and_a_level_over_what_is_added() -> None:
    made = planned(ZEN, cli(optimize=2, channels_last=False), NAMED, AUTO)
    assert shown(made, "channels_last") == ("off", "cli")
    assert shown(made, "graph") == ("inductor", "profile:mine")
    assert shown(made, "weights") == ("fp32", "cli -O2")
    assert shown(made, "openmp")[0] == "default"
    assert made.profile == "mine,server"
    meaning = note(made, "optimize").reason
    assert meaning.startswith("--weights fp32: results differ by rounding; chosen otherwise: ")
    assert "graph [profile:mine]" in meaning
    assert "channels_last [cli]" in meaning


@pytest.mark.parametrize(
    ("chosen", "effect"),
    [
        ({}, "--graph onednn, --weights int8, --channels-last, --precision bf16: products and weights have 8 bits"),
        ({"weights": "fp32"}, "--graph onednn, --channels-last, --precision bf16: products have 8 bits of precision"),
        ({"precision": "fp32"}, "--graph onednn, --weights int8, --channels-last: weights have 8 bits"),
        ({"weights": "fp32", "precision": "fp32"}, "--graph onednn, --channels-last: results differ by rounding"),
        ({"weights": "fp32", "precision": "fp32", "graph": "off", "channels_last": False}, "adds nothing"),
    ],
    ids=["whole", "other weights", "other precision", "neither", "nothing left"],
)
def test_the_effect_of_a_level_is_that_of_the_settings_that_it_still_decides(chosen, effect: str) -> None:
    reason = note(planned(ZEN, cli(optimize=4, **chosen)), "optimize").reason
    assert reason.startswith(effect)
    assert ("chosen otherwise" in reason) == bool(chosen)


def test_a_variable_of_the_user_wins_over_a_level() -> None:
    made = planned(ZEN, cli(optimize=0), environ={"OMP_NUM_THREADS": "3", "MALLOC_CONF": "mine"})
    assert shown(made, "OMP_NUM_THREADS") == ("3", "environment")


def test_level_0_preloads_nothing_and_takes_no_automatic_profile() -> None:
    host = libraries(ZEN, "tcmalloc", "intel", "mkl-dispatch", torch=replace(TORCH, mkl_dispatch_symbol=True))
    added = replace(AUTO, env=(EnvDefault(name="SOME_VARIABLE", value="1", reason="r"),))
    assert "LD_PRELOAD" in dict(planned(host, added).workers[0].env)
    made = planned(host, cli(optimize=0), added)
    assert made.profile is None
    assert not {"LD_PRELOAD", "SOME_VARIABLE", "MALLOC_CONF"} & dict(made.workers[0].env).keys()
    for name, value in (("openmp", "default"), ("allocator", "default"), ("mkl_dispatch", "off")):
        assert shown(made, name) == (value, "cli -O0")
        assert note(made, name).reason == "level 0 preloads nothing"
    assert made.workers[0].cpus
    assert dict(made.workers[0].env)["OMP_NUM_THREADS"] == "4"


def test_a_named_profile_stays_at_level_0() -> None:
    host = libraries(ZEN, "jemalloc", torch=TORCH)
    made = planned(host, cli(optimize=0), NAMED, AUTO)
    assert made.profile == "mine"
    assert shown(made, "allocator") == ("jemalloc", "profile:mine")
    assert shown(made, "openmp") == ("default", "cli -O0")


def test_level_1_is_the_default() -> None:
    one, default = planned(ZEN, cli(optimize=1), AUTO), planned(ZEN, AUTO)
    assert one.workers == default.workers
    assert [each for each in one.notes if each.setting != "optimize"] == list(default.notes)


@pytest.mark.parametrize(
    ("host", "level", "part"),
    [
        (WITHOUT_AMX, 3, "weights have 8 bits of precision; no products in bf16: without AMX they are slower"),
        (PLAIN, 3, "results differ by rounding; no bf16: this CPU has no bf16 instructions"),
        (PLAIN, 4, "weights have 8 bits; no bf16: this CPU has no bf16 instructions"),
        (UNKNOWN, 3, "it is not known whether this CPU has bf16 instructions"),
    ],
)
def test_a_level_without_bf16_says_so_and_is_no_warning(host: Host, level: int, part: str) -> None:
    made = planned(host, cli(optimize=level))
    assert part in note(made, "optimize").reason
    assert not made.warnings
    assert not [entry for entry in made.notes if entry.setting == "precision"]


def test_a_profile_may_choose_a_level() -> None:
    mine = Layer(origin="profile:mine", values={"optimize": 3, "precision": "fp32"}, reasons={"optimize": "measured"})
    made = planned(ZEN, mine, AUTO)
    assert shown(made, "weights") == ("bf16", "profile:mine -O3")
    assert shown(made, "precision") == ("fp32", "profile:mine")
    assert note(made, "optimize").reason.startswith("measured; --graph onednn, --weights bf16, --channels-last: ")
    assert shown(planned(ZEN, cli(optimize=2), mine), "weights") == ("fp32", "cli -O2")


def test_the_level_of_an_automatic_profile_is_below_that_profile() -> None:
    server = Layer(origin="profile:server", values={"optimize": 2, "graph": "off"}, automatic=True)
    other = Layer(origin="profile:other", values={"weights": "int8"}, automatic=True)
    made = planned(ZEN, server, other)
    assert shown(made, "graph") == ("off", "profile:server")
    assert shown(made, "weights") == ("fp32", "profile:server -O2")


def test_a_level_degrades_like_its_settings() -> None:
    (warning,) = planned(replace(ZEN, torch=replace(TORCH, version="2.4.1")), cli(optimize=2)).warnings
    assert warning == (
        "torch 2.4.1 cannot load plugins (2.5 or newer can); not applied: "
        "--graph onednn, --weights fp32, --channels-last"
    )
    ipex = replace(ZEN, torch=replace(TORCH, version="2.8.0", extensions=("intel_extension_for_pytorch",)))
    made = planned(ipex, cli(optimize=2, ipex=True))
    assert note(made, "graph").reason == "not applied: --ipex handles the same modules"
    assert note(made, "weights").reason == "not applied: --ipex handles the same modules"
    assert note(made, "optimize").reason.endswith("; not applied: --graph onednn, --weights fp32")
    assert not made.warnings


def test_release_weights_needs_a_level_with_weights_in_fewer_bits() -> None:
    made = planned(ZEN, cli(optimize=3, release_weights=True))
    assert shown(made, "release_weights") == ("on", "cli")
    assert "half of its share" in note(made, "graph_memory").reason
    assert not made.warnings
    made = planned(ZEN, cli(optimize=2, release_weights=True))
    assert shown(made, "release_weights") == ("off", "cli")
    assert "a quarter of its share" in note(made, "graph_memory").reason
    assert made.warnings == ("--release-weights is not applied: --weights fp32 replaces no originals",)


def test_layers_without_a_level_stay_as_they_are() -> None:
    assert with_level((NAMED, AUTO), ZEN) == ((NAMED, AUTO), "mine,server")
