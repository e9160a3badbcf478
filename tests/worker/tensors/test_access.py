"""Watched tensors."""

import pytest

torch = pytest.importorskip("torch")

from cpulaunch.worker.tensors import access  # noqa: E402

pytestmark = pytest.mark.torch


class Watching:
    changed = False


def test_storages_without_watchers_are_forgotten() -> None:
    tensors, kept = [torch.ones(1) for _ in range(20 * access.MIN_PRUNED)], Watching()
    access.watch_access(kept, tensors[:1])
    for tensor in tensors[1:]:
        access.watch_access(Watching(), [tensor])
    assert len(access._watchers) <= 4 * access.MIN_PRUNED
    _ = tensors[0].data
    assert kept.changed
