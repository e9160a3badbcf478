"""Whether ccl is available, as far as one process can determine; these tests need neither torch nor oneCCL."""

import sys

import pytest
from ccl_ranks import LIBRARY

from cpulaunch.worker.ccl.availability import has_oneccl, is_available

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backend ccl is for Linux")


def test_has_oneccl_if_it_is_installed():
    assert has_oneccl() is (LIBRARY is not None)


def test_availability_follows_the_requested_path():
    found = {path: is_available({"CPULAUNCH_CCL_PATH": path}) for path in ("auto", "memory", "oneccl")}
    assert found == {"auto": True, "memory": True, "oneccl": has_oneccl()}
    assert is_available({})
