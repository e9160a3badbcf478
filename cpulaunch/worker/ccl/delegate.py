"""gloo's group of the same ranks, for what the backend "ccl" does not do itself."""

from __future__ import annotations

import os
import threading
import time

import torch
from torch import distributed as dist

from cpulaunch.records.torch_settings import VARIABLE, TorchSettings, decode
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError
from cpulaunch.worker.reporting.degradation import warned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any

FAILURE_KEY = "failed"
"""Key of a group's store with the reason why the group could not be set up on some rank."""
POLL_SECONDS = 0.1
_mentioned: set[str] = set()


def mention(text: str) -> None:
    """Effect: warns once in a process."""
    if text not in _mentioned:
        _mentioned.add(text)
        settings = os.environ.get(VARIABLE)
        warned(decode(settings) if settings else TorchSettings(), text)


def open_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group over gloo, once all ranks have created it. Raises: CclError as soon as the set-up of a rank fails."""
    _meet(store, size, timeout)
    made: list[Any] = []
    errors: list[Exception] = []

    def make() -> None:
        try:
            made.append(dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout))
            _wait_for_all(store, rank, size, timeout)
        except Exception as error:  # noqa: BLE001 - raised by the calling thread
            errors.append(error)

    thread = threading.Thread(target=make, name="gloo set-up", daemon=True)
    watched = _copy_of(store)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        if thread.is_alive() and watched is not None:
            _check_failure(watched)
    if errors:
        raise errors[0]
    group, kind = _group_of_gloo(store, rank, size), dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, made[0])
    return group


def _group_of_gloo(store: Any, rank: int, size: int) -> Any:
    """A group without backends, whose default is gloo."""
    make: Any = dist.ProcessGroup
    if hasattr(make, "Options"):  # torch before 2.6.
        return make(store, rank, size, make.Options("gloo"))
    group = make(store, rank, size)
    group._set_default_backend(make.BackendType.GLOO)
    return group


def _meet(store: Any, size: int, timeout: timedelta) -> None:
    """Effect: returns once all ranks are about to create gloo's group.

    A thread that waits for a lost rank in gloo itself cannot be ended, and one that wakes while the interpreter shuts
    down ends the process with SIGABRT (pytorch issue 38228). Raises: CclError if a rank fails; PeerLostError.
    """
    if store.add("gloo begun", 1) == size:
        store.set("gloo begins", "")
    deadline, pause = time.monotonic() + timeout.total_seconds(), 0.001
    while not store.check(["gloo begins"]):
        _check_failure(store)
        if time.monotonic() > deadline:
            raise PeerLostError("Timed out waiting for all ranks of the group to join")
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)


def _check_failure(store: Any) -> None:
    """Raises: CclError if the set-up of a rank has failed."""
    if store.check([FAILURE_KEY]):
        raise CclError(f"the group cannot be created: {store.get(FAILURE_KEY).decode()}")


def _wait_for_all(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Effect: returns once all ranks have connected: one that destroys its group closes connections of slower ones.

    Rank 0 usually runs the store's server, and may exit at once: it returns once the others need the store no more.
    """
    if store.add("gloo made", 1) == size:
        store.set("gloo ready", "")
    store.wait(["gloo ready"], timeout)
    if rank == 0 and size > 1:
        store.wait(["gloo seen"], timeout)
    elif rank > 0 and store.add("gloo seen by", 1) == size - 1:
        store.set("gloo seen", "")


def _copy_of(store: Any) -> Any:
    """Another connection to the store, as calls of one wait for each other; None if the store or torch has none."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
