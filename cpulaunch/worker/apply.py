"""Every setting's way into torch: a table of rows, each applied on its own, each allowed to fail on its own."""

from __future__ import annotations

import os
from importlib import import_module

from cpulaunch.records.record import fields, record
from cpulaunch.records.torch_settings import EVENTS_VARIABLE, TorchSettings, decode
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import tell
from cpulaunch.worker.reporting.process_identity import claim, is_worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


@record(kw_only=False)
class Row:
    """A setting, when it is wanted, and the function of this package ("module:function") that applies it.

    The function takes the settings and returns what it did, in a few words. Whatever it raises is told as the reason
    why the setting is off.
    """

    name: str
    wanted: Callable[[TorchSettings], bool]
    target: str


def _calls_wanted(settings: TorchSettings) -> bool:
    """Whether anything is to be done around the calls of modules (without importing what does it)."""
    rest = _beside_ipex(settings)
    chosen = (rest.graph != "off", rest.precision in ("bf16", "fp16"), rest.inference_mode, rest.channels_last)
    return any(chosen) or _barrier_stands()


def install_calls(settings: TorchSettings) -> str:
    """Effect: calls of modules do what the settings say around them."""
    from cpulaunch.worker.features import module_calls as calls
    from cpulaunch.worker.reporting.barrier import wait

    return calls.install(_beside_ipex(settings), first_call=wait if _barrier_stands() else None)


def _beside_ipex(settings: TorchSettings) -> TorchSettings:
    """The settings without those that ipex.optimize carries out itself: graph and precision."""
    if not settings.ipex or "ipex" in _failed:
        return settings
    values = {name: getattr(settings, name) for name in fields(TorchSettings)}
    return TorchSettings(**values | {"graph": "off", "precision": None})


def _barrier_stands() -> bool:
    """Whether the launch waits for its workers; see launch/monitor/start_barrier.py."""
    from cpulaunch.worker.reporting.barrier import ARRIVALS

    events = os.environ.get(EVENTS_VARIABLE)
    return bool(events) and os.path.exists(os.path.join(os.path.dirname(str(events)), ARRIVALS))


ROWS = (
    Row("report", lambda settings: True, "reporting.exit_report:install"),
    Row("children", lambda settings: settings.restore_preload or bool(settings.cpus), "process.children:install"),
    Row("affinity", lambda settings: bool(settings.cpus or settings.loader_cpus), "process.fork_guard:install"),
    Row("threads", lambda settings: settings.threads is not None, "process.threads:set_threads"),
    Row(
        "interop_threads", lambda settings: settings.interop_threads is not None, "process.threads:set_interop_threads"
    ),
    Row(
        "precision",
        lambda settings: settings.precision in ("fp32", "tf32", "medium"),
        "features.arithmetic:set_precision",
    ),
    Row("flush_denormal", lambda settings: settings.flush_denormal, "features.arithmetic:flush_denormals"),
    Row("cudnn_benchmark", lambda settings: settings.cudnn_benchmark, "features.arithmetic:time_cudnn"),
    Row("debug_apis", lambda settings: not settings.debug_apis, "features.debug_apis:switch_off"),
    Row("mmap_weights", lambda settings: settings.mmap_weights, "features.mapped_checkpoints:install"),
    Row(
        "dataloader_workers", lambda settings: settings.dataloader_workers is not None, "features.loaders:give_workers"
    ),
    Row("pin_memory", lambda settings: settings.pin_memory, "features.loaders:pin_memory"),
    Row("prefetch", lambda settings: settings.prefetch is not None, "features.loaders:prefetch"),
    Row("persistent_workers", lambda settings: settings.persistent_workers, "features.loaders:persist"),
    Row("fused_optimizers", lambda settings: settings.fused_optimizers, "features.optimizers:install"),
    Row("ipex", lambda settings: settings.ipex, "features.ipex:install"),
    Row("ccl", lambda settings: True, "ccl.registration:offer"),
    Row("dist_backend", lambda settings: bool(settings.dist_backend), "ccl.registration:choose"),
    Row("calls", _calls_wanted, "apply:install_calls"),
)

_done: list[str] = []
"""The text that was applied: at most one in each process, and its forked children inherit the effects."""

_failed: set[str] = set()


def apply_all(text: str) -> None:
    """Effect: the settings encoded in the text take effect, once; what fails is told and left out. Never raises."""
    if _done:
        return
    _done.append(text)
    claim()
    try:
        settings = decode(text)
    except (ValueError, TypeError) as error:
        degraded(TorchSettings(), "settings", f"nothing is applied: CPULAUNCH_WORKER is not ours ({error})")
        return
    for row in ROWS:
        _apply(row, settings)


def _apply(row: Row, settings: TorchSettings) -> None:
    if not row.wanted(settings):
        return
    module, _, function = row.target.partition(":")
    try:
        detail = getattr(import_module(f"cpulaunch.worker.{module}"), function)(settings)
    except Exception as error:  # noqa: BLE001 - whatever it is, the user's program goes on without this setting
        _failed.add(row.name)
        degraded(settings, row.name, str(error) or type(error).__name__)
        return
    if detail and is_worker():
        tell("applied", setting=row.name, detail=detail)
