"""Whether ccl is available, as far as one process can determine; these tests need neither torch nor oneCCL."""

import sys

import pytest
from ccl_ranks import LIBRARY

from cpulaunch.worker.ccl.oneccl.library import is_installed
from cpulaunch.worker.ccl.registration import is_available

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backend ccl is for Linux")


def test_oneccl_is_found_if_it_is_installed():
    assert is_installed() is (LIBRARY is not None)


@pytest.mark.parametrize(
    ("path", "expected"), [("auto", True), ("memory", True), ("oneccl", is_installed()), ("", True)]
)
def test_availability_follows_the_requested_path(monkeypatch, path, expected):
    monkeypatch.setenv("CPULAUNCH_CCL_PATH", path)
    assert is_available() is expected
