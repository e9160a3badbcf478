"""Signal handling and fixtures for all tests."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.probe.captured import unpack

# A background job of a shell, or nohup, ignores these signals, and the processes that tests start would inherit that.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# The first example of a test imports modules, and takes any time while other tests run.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: a long one that starts last would keep one process busy and the others idle."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)  # A stable sort: else in the order of collection.


@pytest.fixture(scope="session")
def captured_root(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """A function from a captured machine to its root directory, unpacked once in each test process."""
    unpacked: dict[str, Path] = {}

    def root(machine: dict[str, Any]) -> Path:
        if machine["id"] not in unpacked:
            unpacked[machine["id"]] = unpack(machine, tmp_path_factory.mktemp("captured"))
        return unpacked[machine["id"]]

    return root
