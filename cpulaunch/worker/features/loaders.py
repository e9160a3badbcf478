"""DataLoader arguments that the program does not pass are set; arguments that it passes are kept.

An argument counts as passed by position or by name, even if its value is torch's default.
"""

from __future__ import annotations

import multiprocessing
from functools import wraps
from inspect import Signature, signature

import torch
from torch.utils.data import DataLoader, IterableDataset

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.features.arithmetic import has_gpu_build
from cpulaunch.worker.reporting.degradation import degraded, warned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_defaults: dict[str, Any] = {}
"""DataLoader argument -> the value to set."""

_warned_of: set[str] = set()


def set_workers(settings: TorchSettings) -> str:
    """Effect: DataLoaders of map-style datasets use this many worker processes."""
    _set_argument("num_workers", settings.dataloader_workers, settings)
    return f"num_workers={settings.dataloader_workers}"


def pin_memory(settings: TorchSettings) -> str:
    """Effect: batches are copied into pinned memory. Raises: RuntimeError in a build without CUDA."""
    if not has_gpu_build():
        raise RuntimeError("this torch is built without CUDA, so pinned memory has no benefit")
    _set_argument("pin_memory", True, settings)
    return "pin_memory=True"


def set_prefetch(settings: TorchSettings) -> str:
    """Effect: each DataLoader worker prefetches this many batches."""
    _set_argument("prefetch_factor", settings.prefetch, settings)
    return f"prefetch_factor={settings.prefetch}"


def keep_workers(settings: TorchSettings) -> str:
    """Effect: DataLoader workers are kept alive between epochs."""
    _set_argument("persistent_workers", True, settings)
    return "persistent_workers=True"


def _set_argument(argument: str, value: Any, settings: TorchSettings) -> None:
    loader: Any = DataLoader
    if not _defaults:
        loader.__init__ = _with_arguments(loader.__init__, settings)
    _defaults[argument] = value


def _with_arguments(plain: Callable[..., None], settings: TorchSettings) -> Callable[..., None]:
    known = signature(plain)

    @wraps(plain)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            added = _added_arguments(known, (self, *arguments), named, settings)
        except Exception as error:  # noqa: BLE001 - the DataLoader is created as the program wrote it
            added = {}
            degraded(settings, "data_loading", f"a DataLoader is left unchanged: {type(error).__name__}: {error}")
        plain(self, *arguments, **named, **added)

    return init


def _added_arguments(
    known: Signature, arguments: tuple[Any, ...], named: dict[str, Any], settings: TorchSettings
) -> dict[str, Any]:
    """The arguments to add to a call of DataLoader; none if the call is invalid."""
    try:
        passed = known.bind(*arguments, **named).arguments
    except TypeError:
        return {}
    added = {name: value for name, value in _defaults.items() if name not in passed}
    if "num_workers" in added and (reason := _main_process_reason(passed["dataset"])):
        del added["num_workers"]
        _warn_once(settings, f"--dataloader-workers: {reason}")
    has_workers = bool(added.get("num_workers", passed.get("num_workers", 0)))
    if "prefetch_factor" in added and not has_workers:
        del added["prefetch_factor"]
    if "persistent_workers" in added and not (has_workers and _is_map_style(passed["dataset"])):
        del added["persistent_workers"]
    if "pin_memory" in added and not torch.cuda.is_available():
        del added["pin_memory"]
    return added


def _is_map_style(dataset: object) -> bool:
    """Whether persistent workers are safe: in them an IterableDataset may be exhausted after the first epoch."""
    return not isinstance(dataset, IterableDataset)


def _main_process_reason(dataset: object) -> str:
    """Why this dataset must be loaded in the main process; empty if workers may load it."""
    if not _is_map_style(dataset):
        return (
            "an IterableDataset is loaded in the main process, because every DataLoader worker would repeat all samples"
        )
    if multiprocessing.current_process().daemon:
        return "daemonic processes cannot start DataLoader workers"
    if not _forks():
        return "processes are spawned here, and the dataset may not be picklable"
    return ""


def _forks() -> bool:
    """Whether multiprocessing forks, by the program's choice or by default. Effect: none; the default is not fixed."""
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork"


def _warn_once(settings: TorchSettings, reason: str) -> None:
    if reason not in _warned_of:
        _warned_of.add(reason)
        warned(settings, reason)
