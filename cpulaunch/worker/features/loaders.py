"""DataLoader defaults: what the program leaves at torch's is filled in, what it says stays.

An argument counts as said if it is passed at all, by position or by name, also with torch's own value.
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
"""DataLoader argument -> the value that it gets."""

_told: set[str] = set()


def give_workers(settings: TorchSettings) -> str:
    """Effect: map-style datasets are loaded by this many processes."""
    _fill("num_workers", settings.dataloader_workers, settings)
    return f"num_workers={settings.dataloader_workers}"


def pin_memory(settings: TorchSettings) -> str:
    """Effect: batches are copied into pinned memory. Raises: RuntimeError without CUDA."""
    if not has_gpu_build():
        raise RuntimeError("this torch is built without CUDA: pinned memory would only cost a copy")
    _fill("pin_memory", True, settings)
    return "pin_memory=True"


def prefetch(settings: TorchSettings) -> str:
    """Effect: each loader process prepares this many batches ahead."""
    _fill("prefetch_factor", settings.prefetch, settings)
    return f"prefetch_factor={settings.prefetch}"


def persist(settings: TorchSettings) -> str:
    """Effect: loader processes live on between epochs."""
    _fill("persistent_workers", True, settings)
    return "persistent_workers=True"


def _fill(argument: str, value: Any, settings: TorchSettings) -> None:
    loader: Any = DataLoader
    if not _defaults:
        loader.__init__ = _filling(loader.__init__, settings)
    _defaults[argument] = value


def _filling(plain: Callable[..., None], settings: TorchSettings) -> Callable[..., None]:
    known = signature(plain)

    @wraps(plain)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            added = _filled_in(known, (self, *arguments), named, settings)
        except Exception as error:  # noqa: BLE001 - the program gets the DataLoader it wrote
            added = {}
            degraded(settings, "data_loading", f"a DataLoader stays as it is: {type(error).__name__}: {error}")
        plain(self, *arguments, **named, **added)

    return init


def _filled_in(
    known: Signature, arguments: tuple[Any, ...], named: dict[str, Any], settings: TorchSettings
) -> dict[str, Any]:
    """The arguments to add to a call; none to one that DataLoader would refuse."""
    try:
        said = known.bind(*arguments, **named).arguments
    except TypeError:
        return {}
    added = {name: value for name, value in _defaults.items() if name not in said}
    if "num_workers" in added and (reason := _why_not(said["dataset"])):
        del added["num_workers"]
        _tell_once(settings, f"--dataloader-workers: {reason}")
    several = bool(added.get("num_workers", said.get("num_workers", 0)))
    if "prefetch_factor" in added and not several:
        del added["prefetch_factor"]
    if "persistent_workers" in added and not (several and _is_map_style(said["dataset"])):
        del added["persistent_workers"]
    if "pin_memory" in added and not torch.cuda.is_available():
        del added["pin_memory"]
    return added


def _is_map_style(dataset: object) -> bool:
    """Whether it is the same from epoch to epoch: an IterableDataset may end where it is, and would stay there."""
    return not isinstance(dataset, IterableDataset)


def _why_not(dataset: object) -> str:
    """Why this dataset cannot be given to several processes; empty if it can."""
    if not _is_map_style(dataset):
        return "an IterableDataset stays in the main process: each loader process would repeat all of its samples"
    if multiprocessing.current_process().daemon:
        return "a daemonic process may not have loader processes"
    if not _forks():
        return "processes are not forked here: the dataset might not survive the way to a spawned one"
    return ""


def _forks() -> bool:
    """Whether multiprocessing forks: as chosen, or else by default, which this does not make the choice."""
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork"


def _tell_once(settings: TorchSettings, reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        warned(settings, reason)
