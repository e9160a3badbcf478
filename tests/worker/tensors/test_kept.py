"""Tensors that a call leaves behind."""

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cpulaunch.worker.tensors import kept  # noqa: E402
from cpulaunch.worker.tensors.kept import KeptTensors  # noqa: E402
from cpulaunch.worker.tensors.mutation import restore_random_state  # noqa: E402

pytestmark = pytest.mark.torch

KEPT: list[Any] = []


def add_to_argument(argument: dict[str, Any]) -> Any:
    argument["new"] = torch.ones(2)
    return argument


def keep(argument: dict[str, Any]) -> Any:
    KEPT.append({"inside": [torch.ones(2)]})
    return argument["old"] + 1


def compute(argument: dict[str, Any]) -> Any:
    return (argument["old"] + 1) * 2, {"other": argument["old"] - 1}


def view(argument: dict[str, Any]) -> Any:
    return (argument["old"] + 1).view(2, 1)


@pytest.mark.parametrize(
    ("function", "expected"), [(add_to_argument, True), (keep, True), (compute, False), (view, False)]
)
def test_tensors_beside_the_result_are_found(function, expected: bool) -> None:
    argument = {"old": torch.ones(2)}
    before = KeptTensors()
    assert before.found(function(argument), argument) is expected


@pytest.mark.parametrize(("function", "expected"), [(add_to_argument, True), (keep, True), (compute, False)])
def test_tensors_in_containers_are_found_while_other_threads_compute(function, expected: bool) -> None:
    computing, done, argument = threading.Event(), threading.Event(), {"old": torch.ones(2)}

    def compute_too() -> None:
        while not done.is_set():
            tensor = torch.ones(2) + 1
            computing.set()
            done.wait(0.001)
            del tensor

    thread = threading.Thread(target=compute_too)
    thread.start()
    try:
        assert computing.wait(60)
        before = KeptTensors()
        assert before.found(function(argument), argument) is expected
    finally:
        done.set()
        thread.join()


def test_lists_of_another_threads_search_keep_no_tensors(monkeypatch) -> None:
    """Nor do those that it makes of its own result."""
    listed, plain, argument = threading.Event(), kept.flatten, {"old": torch.ones(2)}

    def flatten(value: Any, tensors: list[Any], **options: int) -> Any:
        spec = plain(value, tensors, **options)
        if threading.current_thread() is not threading.main_thread():
            listed.set()
            threading.Event().wait(0.2)
        return spec

    monkeypatch.setattr(kept, "flatten", flatten)
    thread = threading.Thread(target=lambda: KeptTensors().found(torch.ones(2), ()))
    before = KeptTensors()
    thread.start()
    assert listed.wait(60)
    assert not before.found(compute(argument), argument)
    thread.join()


@pytest.mark.parametrize("others", [False, True])
def test_the_random_state_is_set_back_unless_other_threads_may_draw(monkeypatch, others: bool) -> None:
    """Earlier tests of this process may have left threads."""
    threads = [threading.current_thread(), *[threading.Thread(target=int)] * others]
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    before = torch.get_rng_state()
    torch.rand(1)
    drawn = torch.get_rng_state()
    restore_random_state(before)
    assert torch.equal(torch.get_rng_state(), drawn if others else before)
