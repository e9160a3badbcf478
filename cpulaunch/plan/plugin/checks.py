"""Settings inside torch: which of the requested ones apply on this host, with errors and warnings for the others."""

from __future__ import annotations

from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import BF16_FEATURES, Host
from cpulaunch.records.record import field, record
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.settings import PLUGIN_SETTINGS, setting_specs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from cpulaunch.plan.placement.instances import Placement
    from cpulaunch.records.plan import Note, VariableRequest

FIRST_TORCH = (2, 5)
"""The first torch that loads plugins of other packages. Source: torch 2.5 release notes, "torch.backends"."""
LAST_IPEX_TORCH = (2, 8)
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
GPU_SETTINGS = ("pin_memory", "cudnn_benchmark")
FEATURES = {
    "bf16": BF16_FEATURES,
    "fp16": ("avx512_fp16", "amx_fp16", "fp16"),
}
"""CPU features that make products of the type faster than those of fp32; the last one is Arm's."""


@record
class TorchChoices:
    """The settings inside torch: the values that apply, by name, and the reason for each that does not apply.

    `remarks`: what is known of some settings on this host, by name.
    `plugin_missing_reason`: why cpulaunch's plugin will not run inside the worker's torch; None if it will, as far
    as the installed files show.
    """

    values: Mapping[str, Any]
    not_applied: Mapping[str, str]
    plugin_missing_reason: str | None
    warnings: tuple[str, ...]
    remarks: Mapping[str, str] = field(default_factory=dict)

    @property
    def plugin(self) -> bool:
        """Whether any setting needs the plugin."""
        return any(value != setting_specs()[name].default for name, value in self.values.items())


@record
class Collectives:
    """The backend of collectives among the settings inside torch, and the CPUs left to compute on.

    `ccl_cpus`: the CPUs of oneCCL's own threads, by local rank; empty without such threads. `unmeasured`: the choice
    depends on a measurement on this host.
    """

    placement: Placement
    choices: TorchChoices
    ccl_cpus: tuple[frozenset[int], ...] = ()
    variable_requests: tuple[VariableRequest, ...] = ()
    notes: tuple[Note, ...] = ()
    warnings: tuple[str, ...] = ()
    unmeasured: bool = False


def choose_torch_settings(host: Host, request: LaunchRequest) -> TorchChoices:
    """The settings inside torch that apply.

    Raises: UsageError if flags contradict each other or need a package that is not installed.
    """
    not_applied: dict[str, str] = {}
    warnings: list[str] = []
    for name, why in _not_applicable(host, request):
        if request.origin(name) == "cli":
            warnings.append(f"{_flag(request, name)} is not applied: {why}")
        not_applied[name] = why
    table = setting_specs()
    names = PLUGIN_SETTINGS
    values = {name: table[name].default if name in not_applied else getattr(request.settings, name) for name in names}
    missing = _plugin_missing_reason(host, request)
    chosen = [name for name in names if values[name] != table[name].default]
    if missing is not None and chosen:
        flags = ", ".join(_flag(request, name) for name in chosen)
        warnings.append(f"{missing}; not applied: {flags}")
    warnings += [*_slow_precision(host, request), *_open_stores(request)]
    return TorchChoices(
        values=values,
        not_applied=not_applied,
        plugin_missing_reason=missing,
        warnings=tuple(warnings),
        remarks=_converted_weights(host, values["weights"]) | _lost_of_level(request, not_applied),
    )


def _lost_of_level(request: LaunchRequest, not_applied: Mapping[str, str]) -> dict[str, str]:
    """Which settings of the optimization level do not apply here; empty if all do. Their own notes say why."""
    lost = [name for name in not_applied if request.is_by_level(name)]
    return {"optimize": "not applied: " + ", ".join(_flag(request, name) for name in lost)} if lost else {}


def _flag(request: LaunchRequest, name: str) -> str:
    """The setting as the user would type it."""
    return " ".join(setting_specs()[name].arguments(getattr(request.settings, name)))


def plugin_missing_reason(host: Host, environ: Mapping[str, str], *, interpreter: str = "") -> str | None:
    """Why cpulaunch's plugin will not run inside the worker's torch; None if it will or nothing is known of that torch.

    `interpreter`: the Python whose environment was searched for torch; empty if none was.
    Source: torch/__init__.py, _is_device_backend_autoload_enabled.
    """
    autoload = environ.get(AUTOLOAD, "1")
    if autoload != "1":
        return f"{AUTOLOAD}={autoload} keeps torch from loading cpulaunch's plugin"
    if host.torch is None:
        return f"{interpreter} has no torch" if interpreter else None
    version = host.torch_release
    if version is not None and version < FIRST_TORCH:
        return f"torch {host.torch.version} cannot load plugins (2.5 or newer can)"
    if not host.torch.plugin and host.plugin_path is None:
        return f"cpulaunch is not installed in the environment of the worker's torch ({host.torch.path})"
    return None


def on_one_host(request: LaunchRequest) -> bool:
    """Whether this is a job whose ranks are all on this host."""
    if not request.distributed:
        return False
    from cpulaunch.plan.ranks.job import job_hosts  # Only jobs of ranks import it.

    return job_hosts(request.settings)[1] == 1


def _open_stores(request: LaunchRequest) -> tuple[str, ...]:
    """A warning if a variable switches off what keeps the stores of a job on one host from the network."""
    autoload = _worker_environ(request).get(AUTOLOAD, "1")
    if autoload == "1" or not on_one_host(request):
        return ()
    return (f"{AUTOLOAD}={autoload}: stores that the ranks make listen on all addresses of this host",)


def _worker_environ(request: LaunchRequest) -> dict[str, str]:
    profile = {variable.name: variable.value for _, variable in request.profile_env}
    return {**profile, **request.environ, **dict(request.settings.env)}


def _plugin_missing_reason(host: Host, request: LaunchRequest) -> str | None:
    environ = _worker_environ(request)
    interpreter = request.program.interpreter if request.program and host.sysroot is None else ""
    return plugin_missing_reason(host, environ, interpreter=interpreter)


def _not_applicable(host: Host, request: LaunchRequest) -> Iterator[tuple[str, str]]:
    """The settings that cannot apply here, each with the reason. Raises: UsageError if a flag requires one."""
    settings = request.settings
    graph, ipex = settings.graph, settings.ipex
    if ipex and (why := _no_ipex(host)) is not None:
        _check_not_required(request, "ipex", why, hint="--graph onednn --precision bf16 works without it")
        yield "ipex", why
        ipex = False
    if graph == "zentorch" and host.torch is not None and "zentorch" not in host.torch.extensions:
        why = "zentorch is not installed in the worker's environment"
        _check_not_required(request, "graph", why, hint="pip install zentorch, or --graph onednn")
        yield "graph", why
        graph = "off"
    weights = settings.weights
    overridden = dict(_overridden_engines(request, graph=graph != "off", weights=weights is not None)) if ipex else {}
    yield from overridden.items()
    yield from _without_basis(
        request,
        graph="off" if "graph" in overridden else graph,
        weights=None if "weights" in overridden else weights,
    )
    if not host.gpus:
        yield from ((name, "no GPU found") for name in GPU_SETTINGS if getattr(settings, name))


def _check_not_required(request: LaunchRequest, name: str, why: str, *, hint: str) -> None:
    """Raises: UsageError if the setting is from the command line; one from a profile is optional."""
    if request.origin(name) == "cli":
        raise UsageError(why, value=_flag(request, name), source="command line", hint=hint)


def _no_ipex(host: Host) -> str | None:
    """Why intel-extension-for-pytorch cannot be used; None if it can or nothing is known of the worker's torch."""
    if host.torch is None:
        return None
    if "intel_extension_for_pytorch" not in host.torch.extensions:
        return "intel-extension-for-pytorch is not installed in the worker's environment"
    version = host.torch_release
    if version is not None and version > LAST_IPEX_TORCH:
        return f"intel-extension-for-pytorch supports torch up to 2.8, this is {host.torch.version}"
    return None


def _without_basis(request: LaunchRequest, *, graph: str, weights: str | None) -> Iterator[tuple[str, str]]:
    """The settings that say how to do what the settings that apply do not do. Raises: UsageError."""
    settings = request.settings
    if settings.compile_mode is not None and graph != "inductor":
        why = "only --graph inductor has compile modes"
        _check_not_required(request, "compile_mode", why, hint="--graph inductor")
        yield "compile_mode", why
    if settings.release_weights and weights is None:
        why = "there is nothing to release without --weights"
        _check_not_required(request, "release_weights", why, hint="--weights int8, or -O4")
        yield "release_weights", why
    if settings.release_weights and weights == "fp32":
        yield "release_weights", "--weights fp32 replaces no originals"
    if graph == "off" and "graph_budget" in request.origins:
        yield "graph_budget", "nothing is captured without --graph"


def _overridden_engines(request: LaunchRequest, *, graph: bool, weights: bool) -> Iterator[tuple[str, str]]:
    """Which of --ipex and the settings that handle the same modules do not apply: those not on the command line.

    Raises: UsageError if --ipex and another are.
    """
    others = [name for name, chosen in (("graph", graph), ("weights", weights)) if chosen]
    typed = [name for name in others if request.origin(name) == "cli"]
    if typed and request.origin("ipex") == "cli":
        raise UsageError(
            f"--ipex and --{typed[0]} cannot be combined",
            value=f"--ipex {_flag(request, typed[0])}",
            source="command line",
            hint="drop one of the two",
        )
    if typed:
        yield "ipex", f"{_flag(request, typed[0])} handles the same modules"
    else:
        yield from ((name, "--ipex handles the same modules") for name in others)


def _converted_weights(host: Host, weights: str | None) -> dict[str, str]:
    """What is known of bf16 weights on a CPU without bf16 instructions; empty where there is nothing to say."""
    if weights != "bf16" or not host.cpu.isa or host.cpu.has_bf16:
        return {}
    return {"weights": "this CPU has no bf16 instructions, so kernels convert each weight before they multiply"}


def _slow_precision(host: Host, request: LaunchRequest) -> tuple[str, ...]:
    """A warning if the requested precision is not faster than fp32 on the CPU, unless the host has GPUs.

    Source of the figure: 8 linear layers of width 512, batch 1, torch 2.13.0, AMD Zen 5: a third of fp32's speed.
    """
    precision = request.settings.precision or ""
    features = FEATURES.get(precision)
    if features is None or host.gpus or not host.cpu.isa:
        return ()
    if not host.cpu.isa.isdisjoint(features):
        slow = precision == "bf16" and not host.cpu.multiplies_bf16_faster
        return ("--precision bf16 is slower than fp32 on an Intel CPU without AMX",) if slow else ()
    return (
        f"--precision {precision} is emulated on this CPU, which has neither {features[0]}, {features[1]} nor Arm's "
        f"{features[2]}: expect it to be several times slower than fp32 (small models in eager mode can be 3 times "
        "slower even with avx512_bf16)",
    )
