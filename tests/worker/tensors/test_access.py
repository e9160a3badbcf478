"""Watched tensors."""

from typing import Any

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


class Pending:
    """A work that ends when it is told to."""

    ended = False

    def is_completed(self) -> bool:
        return self.ended


def test_a_collective_into_a_watched_tensor_is_noticed_and_holds_it_until_it_ends(monkeypatch) -> None:
    monkeypatch.setattr(access, "_watchers", {})  # Of tensors that are gone, whose memory is another's by now.
    tensor, other, watching, work = torch.ones(4), torch.ones(4), Watching(), Pending()
    access.watch_access(watching, [tensor])

    class Group(torch.distributed.ProcessGroup):  # type: ignore[misc]
        def broadcast(self, tensors: list[Any], opts: Any = None) -> Pending:
            return work

    group = Group(0, 1)
    group.broadcast([other])
    assert not watching.changed
    group.broadcast([tensor.detach()])
    assert watching.changed
    assert access.is_receiving(tensor)
    assert not access.is_receiving(other)
    work.ended = True
    assert not access.is_receiving(tensor)
