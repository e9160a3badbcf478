"""Views of parameters in another shape, which torch refuses where a parameter's memory has another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_watchers: list[Callable[[Tensor], None]] = []


def watch_views(watcher: Callable[[Tensor], None]) -> None:
    """Effect: `watcher` is called with a parameter of which torch refuses a view, which is then tried again.

    Programs, and torch.nn.utils.parameters_to_vector, flatten parameters by `view(-1)`.
    """
    if not _watchers:
        _view.__module__, _view.__qualname__ = "torch.nn.parameter", "Parameter.view"  # By which it is pickled.
        setattr(nn.Parameter, "view", _view)  # noqa: B010  mypy refuses to assign a method.
    _watchers.append(watcher)


def _view(self: Tensor, *shape: Any, **named: Any) -> Tensor:
    """What Tensor.view returns."""
    try:
        return Tensor.view(self, *shape, **named)
    except RuntimeError:
        if self.is_contiguous():
            raise
    for watcher in _watchers:
        watcher(self)
    return Tensor.view(self, *shape, **named)
