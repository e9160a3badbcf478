"""Whether ccl is available, as far as one process can determine; these tests need neither torch nor oneCCL."""

import os
import sys

import pytest
from ccl_filter import forbid_reading_others
from ccl_ranks import LIBRARY

from cpulaunch.worker.ccl.availability import has_oneccl, is_available, may_access_peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backend ccl is for Linux")


@pytest.mark.parametrize(("scope", "expected"), [("0\n", True), ("1\n", True), ("2\n", False), ("3\n", False)])
def test_memory_access_depends_on_yama_ptrace_scope(tmp_path, scope, expected):
    yama = tmp_path / "ptrace_scope"
    yama.write_text(scope)
    assert may_access_peers(str(yama)) is expected


def in_child(function):
    """The result of a function in a child process that may not read the memory of other processes."""
    child = os.fork()
    if child == 0:
        try:
            forbid_reading_others()
            os._exit(int(function()))
        finally:
            os._exit(2)
    return {0: False, 1: True}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def test_a_seccomp_filter_can_forbid_memory_access(tmp_path):
    assert may_access_peers(str(tmp_path / "none")) is True
    assert in_child(lambda: may_access_peers(str(tmp_path / "none"))) is False


def test_has_oneccl_if_it_is_installed():
    assert has_oneccl() is (LIBRARY is not None)


def test_availability_follows_the_requested_path():
    found = {path: is_available({"CPULAUNCH_CCL_PATH": path}) for path in ("auto", "memory", "oneccl")}
    assert found["memory"] is may_access_peers()
    assert found["oneccl"] is has_oneccl()
    assert found["auto"] is is_available({}) is (found["memory"] or found["oneccl"])
    assert in_child(lambda: is_available({"CPULAUNCH_CCL_PATH": "memory"})) is False
    assert in_child(lambda: is_available({})) is has_oneccl()
