"""The table of settings that the plugin applies inside torch; each is applied on its own and may fail on its own."""

from __future__ import annotations

import os
from importlib import import_module

from cpulaunch.records.record import record, replace
from cpulaunch.records.torch_settings import DIAGNOSIS_VARIABLE, EVENTS_VARIABLE, TorchSettings, decode
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event
from cpulaunch.worker.reporting.process_identity import claim, is_worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


@record(kw_only=False)
class PluginSetting:
    """A setting of the plugin, whether these settings request it, and the function that applies it.

    `target` is "module:function" below cpulaunch.worker. The function takes the settings and returns in a few words
    what it did. If it raises, the setting stays off and the error is reported as the reason.
    """

    name: str
    requested: Callable[[TorchSettings], bool]
    target: str


def _calls_requested(settings: TorchSettings) -> bool:
    """Whether a setting needs to wrap calls of modules (found out without importing the module that wraps)."""
    rest = _usable(settings)
    low = rest.precision in ("bf16", "fp16")
    chosen = (rest.graph != "off", low, rest.weights is not None, rest.inference_mode, rest.channels_last)
    return any(chosen) or _has_start_barrier()


def install_calls(settings: TorchSettings) -> str:
    """Effect: wraps calls of modules as the settings require."""
    from cpulaunch.worker.features import module_calls as calls
    from cpulaunch.worker.reporting.barrier import wait

    return calls.install(_usable(settings), first_call=wait if _has_start_barrier() else None)


def _usable(settings: TorchSettings) -> TorchSettings:
    """The settings without graph and precision, if ipex.optimize applies these two itself.

    Without a graph, too, if other users could change what torch.compile loads.
    """
    if "compile_cache" in _failed:
        settings = replace(settings, graph="off")
    if not settings.ipex or "ipex" in _failed:
        return settings
    return replace(settings, graph="off", precision=None)


def _has_start_barrier() -> bool:
    """Whether the launch has a start barrier; see launch/monitor/start_barrier.py."""
    from cpulaunch.worker.reporting.barrier import ARRIVALS

    events = os.environ.get(EVENTS_VARIABLE)
    return bool(events) and os.path.exists(os.path.join(os.path.dirname(str(events)), ARRIVALS))


PLUGIN_SETTINGS = (
    PluginSetting("report", lambda settings: True, "reporting.exit_report:install"),
    PluginSetting(
        "children", lambda settings: settings.restore_preload or bool(settings.cpus), "process.children:install"
    ),
    PluginSetting(
        "affinity", lambda settings: bool(settings.cpus or settings.loader_cpus), "process.fork_guard:install"
    ),
    PluginSetting("loopback_store", lambda settings: settings.loopback_store, "process.local_store:install"),
    PluginSetting("gloo_threads", lambda settings: True, "process.gloo_threads:install"),
    PluginSetting("threads", lambda settings: settings.threads is not None, "process.threads:set_threads"),
    PluginSetting(
        "interop_threads", lambda settings: settings.interop_threads is not None, "process.threads:set_interop_threads"
    ),
    PluginSetting(
        "precision",
        lambda settings: settings.precision in ("fp32", "tf32", "medium"),
        "features.arithmetic:set_precision",
    ),
    PluginSetting("flush_denormal", lambda settings: settings.flush_denormal, "features.arithmetic:flush_denormals"),
    PluginSetting("cudnn_benchmark", lambda settings: settings.cudnn_benchmark, "features.arithmetic:benchmark_cudnn"),
    PluginSetting("debug_apis", lambda settings: not settings.debug_apis, "features.debug_apis:disable"),
    PluginSetting("mmap_weights", lambda settings: settings.mmap_weights, "features.mapped_checkpoints:install"),
    PluginSetting(
        "dataloader_workers", lambda settings: settings.dataloader_workers is not None, "features.loaders:set_workers"
    ),
    PluginSetting("pin_memory", lambda settings: settings.pin_memory, "features.loaders:pin_memory"),
    PluginSetting("prefetch", lambda settings: settings.prefetch is not None, "features.loaders:set_prefetch"),
    PluginSetting("persistent_workers", lambda settings: settings.persistent_workers, "features.loaders:keep_workers"),
    PluginSetting("fused_optimizers", lambda settings: settings.fused_optimizers, "features.optimizers:install"),
    PluginSetting(
        "ddp_bucket_mb", lambda settings: settings.ddp_bucket_mb is not None, "distributed.ddp_buckets:install"
    ),
    PluginSetting(
        "compile_cache",
        lambda settings: settings.compile_cache is not None or settings.graph != "off",
        "process.compile_cache:install",
    ),
    PluginSetting("ipex", lambda settings: settings.ipex, "features.ipex:install"),
    PluginSetting("rank_hint", lambda settings: True, "features.rank_hint:install"),
    PluginSetting("ccl", lambda settings: True, "ccl.registration:offer"),
    PluginSetting("dist_backend", lambda settings: bool(settings.dist_backend), "ccl.registration:choose"),
    PluginSetting("calls", _calls_requested, "apply:install_calls"),
    PluginSetting("diagnosis", lambda settings: DIAGNOSIS_VARIABLE in os.environ, "diagnosis.install:install"),
)

_done: list[str] = []
"""The text that was applied: at most one in a process, whose forked children inherit the effects."""

_failed: set[str] = set()


def apply_all(text: str) -> None:
    """Effect: applies the settings encoded in the text, once; reports and leaves out what fails. Never raises."""
    if _done:
        return
    _done.append(text)
    claim()
    try:
        settings = decode(text)
    except (ValueError, TypeError) as error:
        degraded(TorchSettings(), "settings", f"no settings are applied: CPULAUNCH_WORKER is invalid ({error})")
        return
    for plugin_setting in PLUGIN_SETTINGS:
        _apply(plugin_setting, settings)


def _apply(plugin_setting: PluginSetting, settings: TorchSettings) -> None:
    if not plugin_setting.requested(settings):
        return
    module, _, function = plugin_setting.target.partition(":")
    try:
        detail = getattr(import_module(f"cpulaunch.worker.{module}"), function)(settings)
    except Exception as error:  # noqa: BLE001 - the user's program goes on without this setting
        _failed.add(plugin_setting.name)
        degraded(settings, plugin_setting.name, str(error) or type(error).__name__)
        return
    if detail and is_worker():
        report_event("applied", setting=plugin_setting.name, detail=detail)
