"""Errors, notes and warnings about settings inside torch that cannot apply, are not installed, or would be slow."""

import pytest

from cpulaunch.plan.plugin.checks import AUTOLOAD
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import CpuInfo, Gpu, Host, Torch
from cpulaunch.records.plan import Note
from cpulaunch.records.torch_settings import TorchSettings, decode
from tests.plan.machines import TORCH, machine, plan, replace

HOST = replace(machine(cores=4), torch=TORCH)
GPU = replace(HOST, gpus=(Gpu(index=0, vendor="nvidia", pci="0000:17:00.0"),))
IPEX = replace(
    HOST, torch=Torch(version="2.8.0+cpu", path="/t", plugin=True, extensions=("intel_extension_for_pytorch",))
)
NEW_IPEX = replace(IPEX, torch=replace(IPEX.torch, version="2.13.0"))
OLDER = replace(HOST, torch=replace(TORCH, version="2.5.1"))
ZENTORCH = replace(HOST, torch=replace(TORCH, extensions=("zentorch",)))


def settings_of(host: Host, flags: str = "", **more: object) -> TorchSettings:
    return decode(dict(plan(host, flags, **more).workers[0].env)["CPULAUNCH_WORKER"] or "")


def note(host: Host, setting: str, flags: str = "", **more: object) -> Note:
    (found,) = [entry for entry in plan(host, flags, **more).notes if entry.setting == setting]
    return found


def cpu(host: Host, *isa: str, vendor: str = "GenuineIntel") -> Host:
    return replace(host, cpu=CpuInfo(vendor=vendor, isa=frozenset(isa)))


@pytest.mark.parametrize(
    ("host", "flags", "parts"),
    [
        (HOST, "--ipex", ["not installed in", "--ipex", "--graph onednn --precision bf16"]),
        (NEW_IPEX, "--ipex", ["supports torch up to 2.8, this is 2.13.0", "--graph onednn --precision bf16"]),
        (IPEX, "--ipex --graph onednn", ["cannot be combined", "--ipex --graph onednn"]),
        (HOST, "--graph zentorch", ["zentorch is not installed", "--graph zentorch", "--graph onednn"]),
        (HOST, "--compile-mode max-autotune", ["only --graph inductor has compile modes", "--graph inductor"]),
        (HOST, "--graph onednn --compile-mode default", ["only --graph inductor has compile modes"]),
        (IPEX, "--ipex --weights int8", ["--ipex and --weights cannot be combined", "--ipex --weights int8"]),
        (HOST, "--release-weights", ["nothing to release without --weights", "--release-weights", "or -O4"]),
    ],
)
def test_flags_that_cannot_apply_are_errors(host: Host, flags: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        plan(host, flags)
    for part in parts:
        assert part in str(caught.value)
    assert str(caught.value).count("\n") == 1


@pytest.mark.parametrize(
    ("host", "name", "values"),
    [
        (HOST, "ipex", {"ipex": True}),
        (NEW_IPEX, "ipex", {"ipex": True}),
        (HOST, "graph", {"graph": "zentorch"}),
        (HOST, "compile_mode", {"compile_mode": "default"}),
        (HOST, "pin_memory", {"pin_memory": True}),
        (HOST, "cudnn_benchmark", {"cudnn_benchmark": True}),
        (IPEX, "graph", {"graph": "onednn", "ipex": True}),
        (IPEX, "weights", {"weights": "fp32", "ipex": True}),
        (IPEX, "release_weights", {"weights": "fp32", "release_weights": True, "ipex": True}),
        (HOST, "release_weights", {"release_weights": True}),
        (HOST, "graph_budget", {"graph_budget": 5.0}),
    ],
)
def test_settings_of_a_profile_that_cannot_apply_are_noted(host: Host, name: str, values: dict[str, object]) -> None:
    made = plan(host, profile=values)
    assert not made.warnings
    assert getattr(settings_of(host, profile=values), name) == getattr(TorchSettings(), name)
    assert note(host, name, profile=values).reason.startswith("not applied: ")


def test_the_command_line_decides_between_two_engines() -> None:
    graph = settings_of(IPEX, "--graph onednn", profile={"ipex": True})
    assert (graph.graph, graph.ipex) == ("onednn", False)
    ipex = settings_of(IPEX, "--ipex", profile={"graph": "onednn"})
    assert (ipex.graph, ipex.ipex) == ("off", True)
    weights = settings_of(IPEX, "--weights fp32", profile={"ipex": True})
    assert (weights.weights, weights.ipex) == ("fp32", False)
    assert ipex.graph_memory_bytes is None
    assert note(IPEX, "graph", "--ipex", profile={"graph": "onednn"}).value == "off"


@pytest.mark.parametrize(
    ("host", "flags"),
    [
        (IPEX, "--ipex --precision bf16"),
        (ZENTORCH, "--graph zentorch"),
        (HOST, "--graph inductor --compile-mode reduce-overhead"),
        (HOST, "--weights int4 --release-weights"),
        (HOST, "--graph onednn --graph-budget 5"),
        (OLDER, "--weights int8"),
        (GPU, "--cudnn-benchmark --pin-memory"),
    ],
)
def test_settings_that_apply_cause_no_warnings(host: Host, flags: str) -> None:
    assert not plan(host, flags).warnings
    assert settings_of(host, flags) != settings_of(host)


@pytest.mark.parametrize("flag", ["--cudnn-benchmark", "--pin-memory"])
def test_a_gpu_setting_without_gpus_is_warned_of(flag: str) -> None:
    (warning,) = plan(HOST, flag).warnings
    assert warning == f"{flag} is not applied: no GPU found"
    assert settings_of(HOST, flag) == settings_of(HOST)


def test_a_budget_without_graphs_is_warned_of() -> None:
    (warning,) = plan(HOST, "--graph-budget 5").warnings
    assert warning == "--graph-budget 5 is not applied: nothing is captured without --graph"


@pytest.mark.parametrize(
    ("host", "flags", "said"),
    [
        (cpu(HOST, "avx2"), "--weights bf16", True),
        (cpu(HOST, "avx512_bf16"), "--weights bf16", False),
        (cpu(HOST, "neon", "bf16"), "--weights bf16", False),
        (cpu(HOST), "--weights bf16", False),
        (cpu(HOST, "avx2"), "--weights int8", False),
    ],
)
def test_bf16_weights_that_the_cpu_converts_are_allowed_and_noted(host: Host, flags: str, said: bool) -> None:
    assert ("no bf16 instructions" in note(host, "weights", flags).reason) == said
    assert not plan(host, flags).warnings
    assert settings_of(host, flags).weights == flags.split()[1]


UNREADABLE = replace(TORCH, version="unknown")


@pytest.mark.parametrize(
    ("torch", "environ", "reason"),
    [
        (
            replace(TORCH, plugin=False),
            {},
            "cpulaunch is not installed in the environment of the worker's torch (/venv",
        ),
        (replace(TORCH, version="2.4.1"), {}, "torch 2.4.1 cannot load plugins (2.5 or newer can)"),
        (TORCH, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading"),
        (None, {}, "/venv/bin/python has no torch"),
        (UNREADABLE, {}, None),
        (TORCH, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, None),
    ],
)
def test_settings_without_the_plugin_are_warned_of(
    torch: Torch | None, environ: dict[str, str], reason: str | None
) -> None:
    host = replace(HOST, torch=torch)
    warnings = plan(host, "--graph onednn --precision fp32", environ=environ, profile={"debug_apis": False}).warnings
    if reason is None:
        assert not warnings
    else:
        (warning,) = warnings
        assert warning.startswith(reason)
        assert warning.endswith("not applied: --graph onednn, --precision fp32, --no-debug-apis")
    assert not plan(host, environ=environ).warnings


@pytest.mark.parametrize(
    ("flags", "environ", "warned"),
    [
        ("--nproc-per-node 2", {AUTOLOAD: "0"}, True),
        (f"--nproc-per-node 2 --env {AUTOLOAD}=0", {}, True),
        (f"--nproc-per-node 2 --env {AUTOLOAD}=1", {AUTOLOAD: "0"}, False),
        ("--nproc-per-node 2 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint a", {AUTOLOAD: "0"}, False),
        ("--instances 2", {AUTOLOAD: "0"}, False),
        ("--nproc-per-node 2", {}, False),
    ],
)
def test_stores_that_the_plugin_does_not_keep_from_the_network_are_warned_of(
    flags: str, environ: dict[str, str], warned: bool
) -> None:
    said = f"{AUTOLOAD}=0: stores that the ranks make listen on all addresses of this host"
    assert (said in plan(HOST, flags, environ=environ).warnings) == warned


def test_an_unknown_torch_causes_no_errors_or_warnings() -> None:
    unknown = replace(HOST, torch=None)
    assert not plan(replace(unknown, sysroot="/dump"), "--graph zentorch").warnings
    assert not plan(replace(unknown, sysroot="/dump"), "--ipex").warnings
    assert not plan(unknown, "--graph onednn", program=None).warnings


@pytest.mark.parametrize(
    ("host", "flags", "warned"),
    [
        (cpu(HOST, "avx2", "avx512f"), "--precision bf16", True),
        (cpu(HOST, "avx2", "avx512_bf16"), "--precision fp16", True),
        (cpu(HOST, "avx512_bf16"), "--precision bf16", True),
        (cpu(HOST, "avx512_bf16", vendor="AuthenticAMD"), "--precision bf16", False),
        (cpu(HOST, "avx512_bf16", "amx_bf16"), "--precision bf16", False),
        (cpu(HOST, "amx_tile", "amx_bf16"), "--precision bf16", False),
        (cpu(HOST, "neon", "bf16"), "--precision bf16", False),
        (cpu(HOST, "avx512_fp16"), "--precision fp16", False),
        (cpu(HOST, "neon", "fp16"), "--precision fp16", False),
        (cpu(HOST, "avx2"), "--precision tf32", False),
        (cpu(HOST, "avx2"), "--precision fp32", False),
        (cpu(HOST), "--precision bf16", False),
        (cpu(GPU, "avx2"), "--precision bf16", False),
    ],
)
def test_a_precision_that_the_cpu_emulates_is_warned_of(host: Host, flags: str, warned: bool) -> None:
    warnings = plan(host, flags).warnings
    assert bool(warnings) == warned
    assert all("slower than fp32" in warning and flags in warning for warning in warnings)
    assert settings_of(host, flags).precision == flags.split()[1]


def test_pinned_threads_are_warned_of_only_without_the_plugin() -> None:
    users = {"OMP_PROC_BIND": "close"}
    guarded, open_ = HOST, replace(HOST, torch=replace(TORCH, plugin=False))
    assert not plan(guarded, environ=users).warnings
    assert any("DataLoader" in warning for warning in plan(open_, environ=users).warnings)
    assert "the plugin gives forked children" in note(guarded, "OMP_PROC_BIND", "--affinity close").reason
    assert "inherit one" in note(open_, "OMP_PROC_BIND", "--affinity close").reason


@pytest.mark.parametrize(
    ("version", "bundled", "warned"),
    [("2.6.0", True, True), ("2.13.0", True, False), ("2.6.0", False, False)],
)
def test_a_gomp_variable_that_leaves_one_thread_is_warned_of(version: str, bundled: bool, warned: bool) -> None:
    torch = replace(TORCH, version=version, bundled_openmp="/venv/torch.libs/libgomp-a3.so.1" if bundled else None)
    warnings = plan(replace(HOST, torch=torch), environ={"GOMP_CPU_AFFINITY": "0-3"}).warnings
    assert any("OMP_PLACES" in warning for warning in warnings) == warned
