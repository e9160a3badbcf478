"""The settings for each worker's torch, and how the plan shows them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host, Torch
from cpulaunch.records.plan import LaunchPlan, Note
from cpulaunch.records.request import Program
from cpulaunch.records.settings import PLUGIN_SETTINGS
from cpulaunch.records.torch_settings import EVENTS_VARIABLE, VARIABLE, TorchSettings, decode
from cpulaunch.view.plan_view import plan_text
from tests.plan.machines import GIB, SCRIPT, TORCH, libraries, machine, plan, quota, replace

HOST = replace(machine(sockets=2, cores=4), torch=TORCH)
FOUR = replace(machine(cores=4), torch=TORCH)


def env(made: LaunchPlan, index: int = 0) -> dict[str, str | None]:
    return dict(made.workers[index].env)


def settings_of(made: LaunchPlan, index: int = 0) -> TorchSettings:
    return decode(env(made, index)[VARIABLE] or "")


def note(made: LaunchPlan, setting: str) -> Note:
    (found,) = [entry for entry in made.notes if entry.setting == setting]
    return found


@given(st.integers(1, 8), st.integers(0, 3), st.booleans())
def test_every_worker_gets_its_index_threads_and_cpus(instances: int, loaders: int, bound: bool) -> None:
    flags = f"--instances {instances}" + (f" --dataloader-workers {loaders}" if loaders else "")
    made = plan(HOST, flags + ("" if bound else " --binder none"))
    for worker in made.workers:
        settings = settings_of(made, worker.index)
        assert settings == TorchSettings(
            index=worker.index,
            threads=worker.threads,
            cpus=format_cpulist(worker.cpus),
            loader_cpus=format_cpulist(worker.loader_cpus),
            dataloader_workers=loaders or None,
        )


@pytest.mark.parametrize(
    "program",
    [
        SCRIPT,
        replace(SCRIPT, kind="module", target="pkg"),
        Program(kind="command", target="./serve.sh"),
        None,
    ],
)
def test_every_kind_of_program_gets_the_settings(program: Program | None) -> None:
    assert settings_of(plan(FOUR, "--graph onednn", program=program)).graph == "onednn"


FLAGS = {
    "graph": "--graph onednn",
    "graph_signatures": "--graph-signatures 3",
    "compile_mode": "--graph inductor --compile-mode max-autotune",
    "precision": "--precision fp32",
    "weights": "--weights int8",
    "release_weights": "--weights int8 --release-weights",
    "graph_budget": "--graph onednn --graph-budget 5",
    "channels_last": "--channels-last",
    "inference_mode": "--inference-mode",
    "flush_denormal": "--flush-denormal",
    "interop_threads": "--interop-threads 2",
    "mmap_weights": "--mmap-weights",
    "fused_optimizers": "--fused-optimizers",
    "ddp_bucket_mb": "--ddp-bucket-mb 5",
    "prefetch": "--prefetch 4",
    "persistent_workers": "--persistent-workers",
    "strict": "--strict",
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_reaches_the_worker_and_the_plan_says_who_chose_it(name: str) -> None:
    made = plan(FOUR, FLAGS[name])
    assert getattr(settings_of(made), name) not in (None, False, getattr(TorchSettings(), name))
    assert note(made, name).origin == "cli"
    assert note(made, name).reason
    assert not made.warnings


@pytest.mark.parametrize("name", ["debug_apis"])
def test_a_profile_turns_off_what_is_on_by_default(name: str) -> None:
    made = plan(FOUR, profile={name: False})
    assert getattr(settings_of(made), name) is False
    assert (note(made, name).value, note(made, name).origin) == ("off", "profile:p")


def test_every_setting_inside_torch_has_a_field() -> None:
    assert set(PLUGIN_SETTINGS) <= set(TorchSettings.__slots__)  # type: ignore[attr-defined]


def test_without_settings_only_threads_and_cpus_are_set() -> None:
    assert settings_of(plan(FOUR)) == TorchSettings(threads=4, cpus="0-3")


def test_variables_of_an_outer_launch_do_not_reach_the_worker() -> None:
    outer = {
        VARIABLE: '{"graph":"inductor","index":7}',
        EVENTS_VARIABLE: "/run/outer/worker-7.jsonl",
        "CPULAUNCH_WORKER_PID": "7",
    }
    made = plan(FOUR, environ=outer)
    assert settings_of(made) == TorchSettings(threads=4, cpus="0-3")
    assert env(made)[EVENTS_VARIABLE] is env(made)["CPULAUNCH_WORKER_PID"] is None
    assert note(made, VARIABLE).origin == "default"
    assert not {EVENTS_VARIABLE, "CPULAUNCH_WORKER_PID"} & env(plan(FOUR)).keys()


@pytest.mark.parametrize("name", [VARIABLE, EVENTS_VARIABLE])
def test_env_cannot_set_reserved_variables(name: str) -> None:
    with pytest.raises(UsageError, match=f"cpulaunch itself sets {name}"):
        plan(FOUR, f"--env {name}=x")


PRELOADED = replace(libraries(FOUR, "tcmalloc"), torch=TORCH)


@pytest.mark.parametrize(
    ("host", "flags", "environ", "expected"),
    [
        (FOUR, "", {}, (False, None)),
        (FOUR, "", {"LD_PRELOAD": "libmine.so"}, (False, None)),
        (PRELOADED, "", {}, (True, None)),
        (PRELOADED, "", {"LD_PRELOAD": "libmine.so"}, (True, "libmine.so")),
        (PRELOADED, "--env LD_PRELOAD=libnew.so", {"LD_PRELOAD": "libmine.so"}, (True, "libnew.so")),
        (PRELOADED, "--allocator default", {"LD_PRELOAD": "libmine.so"}, (False, None)),
    ],
)
def test_children_get_the_users_own_preloads_back(
    host: Host, flags: str, environ: dict[str, str], expected: tuple[bool, str | None]
) -> None:
    settings = settings_of(plan(host, flags, environ=environ))
    assert (settings.restore_preload, settings.ld_preload) == expected


@pytest.mark.parametrize(
    ("host", "flags", "expected"),
    [
        (replace(FOUR, memory_bytes=16 * GIB), "--graph onednn", 4 * GIB),
        (replace(FOUR, memory_bytes=16 * GIB), "--graph inductor --instances 4", GIB),
        (replace(FOUR, memory_bytes=16 * GIB), "--graph onednn --instances 4 --instance-index 1", GIB),
        (replace(FOUR, memory_bytes=16 * GIB), "", None),
        (replace(FOUR, memory_bytes=16 * GIB), "--precision bf16", 4 * GIB),
        (replace(FOUR, memory_bytes=16 * GIB), "--precision fp32", None),
        (replace(FOUR, memory_bytes=16 * GIB), "--weights int8 --instances 2", 2 * GIB),
        (replace(FOUR, memory_bytes=16 * GIB), "--weights int8 --graph onednn", 4 * GIB),
        (replace(FOUR, memory_bytes=16 * GIB), "--weights int8 --release-weights --instances 2", 4 * GIB),
        (replace(FOUR, memory_bytes=None), "--graph onednn", None),
        (replace(FOUR, limits=replace(FOUR.limits, memory_bytes=8 * GIB)), "--graph onednn", 2 * GIB),
    ],
)
def test_copies_of_weights_fill_a_part_of_a_workers_memory(host: Host, flags: str, expected: int | None) -> None:
    made = plan(host, flags)
    assert settings_of(made).graph_memory_bytes == expected
    assert bool([entry for entry in made.notes if entry.setting == "graph_memory"]) == (expected is not None)


def test_the_text_names_the_variable_without_its_json() -> None:
    flags = "--graph onednn --precision bf16 --dataloader-workers 1 --instances 2"
    made = plan(HOST, flags)
    text = plan_text(made, HOST, width=80, color=False)
    words = " ".join(text.split())
    assert "CPULAUNCH_WORKER {…} settings for the plugin inside torch: threads, cpus, loader_cpus, graph" in words
    assert '"index"' not in text
    assert '"graph":"onednn"' in (env(made)[VARIABLE] or "")
    for name, value in (("graph", "onednn"), ("precision", "bf16"), ("dataloader_workers", "1")):
        assert f"{name} {value} [cli]" in words


def test_the_table_and_the_map_show_the_loaders_cores() -> None:
    text = plan_text(plan(HOST, "--instances 2 --dataloader-workers 1"), HOST, width=80, color=False)
    assert "worker  CPUs  memory       threads  DataLoader CPUs" in text
    assert "1       4-6   preferred 1  3        7" in text
    assert " w1 w1 w1 l1 " in text
    assert "DataLoader workers of worker N" in text
    assert "loader" not in plan_text(plan(HOST, "--instances 2"), HOST, width=80, color=False).lower()


OLD = Torch(version="2.12.1", path="/venv/torch", plugin=True)


@pytest.mark.parametrize(
    ("torch", "expected"), [(OLD, ["threads-4", "threads-3"]), (TORCH, [None, None]), (None, [None, None])]
)
def test_before_torch_2_13_each_thread_count_has_its_own_compile_cache(
    torch: Torch | None, expected: list[str | None]
) -> None:
    made = plan(replace(machine(cores=7), torch=torch), "--instances 2", environ={"USER": "me"})
    assert [settings_of(made, index).compile_cache for index in range(2)] == expected
    assert "TORCHINDUCTOR_CACHE_DIR" not in env(made)


def test_unpinned_workers_under_a_quota_get_the_cpus_of_their_node() -> None:
    made = plan(quota(HOST, 2.0), "--instances 2")
    assert settings_of(made).cpus == format_cpulist(made.workers[0].cpus) == "0-3"
    assert settings_of(plan(HOST, "--binder none")).cpus == ""
