"""A process does not shut its interpreter down while a thread of gloo still works."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import zlib
from collections.abc import Callable

import pytest

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.process import gloo_threads
from tests.worker.applying import case, run_cases

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the program had imported torch.distributed."""
    monkeypatch.setitem(sys.modules, "torch.distributed", None)


def run_named(name: str, work: Callable[[], None]) -> threading.Thread:
    """A running thread that the kernel knows by this name."""
    named = threading.Event()

    def run() -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
            file.write(name)
        named.set()
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    named.wait()
    return thread


def test_waits_for_a_thread_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """zlib computes without the GIL; what follows takes it again."""
    monkeypatch.setattr(gloo_threads, "LIMIT_SECONDS", 60.0)
    done: list[bool] = []
    data = bytes(range(256)) * 80_000
    thread = run_named(gloo_threads.NAME, lambda: done.append(bool(zlib.compress(data, 9))))
    gloo_threads.wait_until_idle()
    assert done == [True]
    thread.join()


def test_does_not_wait_for_idle_and_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_threads, "LIMIT_SECONDS", float("inf"))
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            zlib.compress(bytes(1 << 16))

    threads = [run_named(gloo_threads.NAME, lambda: bool(stop.wait())), run_named("other", compute)]
    gloo_threads.wait_until_idle()
    stop.set()
    for thread in threads:
        thread.join()


def test_gives_up_on_a_thread_that_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_threads, "LIMIT_SECONDS", 0.05)
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            zlib.compress(bytes(1 << 16))

    thread = run_named(gloo_threads.NAME, compute)
    gloo_threads.wait_until_idle()
    assert thread.is_alive()
    stop.set()
    thread.join()


def test_reads_names_of_threads_that_are_no_text() -> None:
    """The kernel cuts names at 15 bytes, also within a character."""
    stop = threading.Event()
    thread = run_named("fünfzehn_bytesö", lambda: bool(stop.wait()))
    gloo_threads.wait_until_idle()
    stop.set()
    thread.join()


def test_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed")
    monkeypatch.setattr(os, "listdir", lambda folder: pytest.fail(folder))
    gloo_threads.wait_until_idle()


def test_installs_itself_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    gloo_threads.install(TorchSettings())
    assert registered == [gloo_threads.wait_until_idle]


PROGRAM = """
    import os, torch, torch.distributed as dist

    def names():
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/comm") as file:
                yield int(thread), file.read().strip()

    def reduce():
        tensor = torch.ones(4)
        dist.all_reduce(tensor)

    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    store = dist.FileStore("store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    reduce()
    gloo = [thread for thread, name in names() if name == "pt_gloo_runloop"]
    for thread in gloo:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    reduce()
    print(len(gloo) > 0)
"""


def test_the_threads_have_this_name_in_torch(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_cases({"exit": case(PROGRAM)}, tmp_path)["exit"]
    assert (outcome.code, outcome.out) == (0, "True\n"), outcome.err
