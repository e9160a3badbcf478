"""Hooks of modules that a program registers, in whichever way, are told to those who watch for them."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.modules import module as torch_module  # noqa: E402

from cpulaunch.worker.features import hooks  # noqa: E402
from cpulaunch.worker.features.hooks import GLOBALLY, REGISTERING, has_hooks, watch_hooks  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a watcher is told. torch's functions are replaced during the test only."""
    for name in REGISTERING:
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))
    for name in GLOBALLY:
        monkeypatch.setattr(torch_module, name, getattr(torch_module, name))
    monkeypatch.setattr(hooks, "_watchers", [])
    parts: list[Any] = []
    watch_hooks(parts.append)
    return parts


@pytest.mark.parametrize("name", REGISTERING)
def test_a_hook_of_a_module_is_told(told: list[Any], name: str) -> None:
    part = nn.Linear(2, 2)
    handle = getattr(part, name)(lambda *given: None)
    assert set(told) == {part}
    assert has_hooks(nn.Sequential(part))
    handle.remove()
    assert not has_hooks(nn.Sequential(part))


@pytest.mark.parametrize("name", GLOBALLY)
def test_a_hook_of_all_modules_is_told(told: list[Any], name: str) -> None:
    handle = getattr(torch_module, name)(lambda *given: None)
    try:
        assert set(told) == {None}
        assert has_hooks(nn.Linear(2, 2))
    finally:
        handle.remove()
        torch_module._global_is_full_backward_hook = None
    assert not has_hooks(nn.Linear(2, 2))


def test_a_module_given_by_name_is_told(told: list[Any]) -> None:
    part = nn.Linear(2, 2)
    nn.Module.register_forward_hook(self=part, hook=lambda *given: None)
    assert set(told) == {part}
    with pytest.raises(TypeError):
        nn.Module.register_forward_hook()


def test_every_way_to_register_a_hook_of_calls_is_watched() -> None:
    def of_calls(names: list[str]) -> set[str]:
        return {name for name in names if name.startswith("register_") and ("forward" in name or "backward" in name)}

    assert of_calls(dir(nn.Module)) <= set(REGISTERING)
    assert of_calls(dir(torch_module)) <= set(GLOBALLY)
