"""Whether ccl can be had, as far as one process can report_event: without torch, without the library."""

import os
import sys

import pytest
from ccl_filter import forbid_reading_others
from ccl_ranks import LIBRARY

from cpulaunch.worker.ccl.availability import has_oneccl, is_available, may_access_peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backend ccl is for Linux")


@pytest.mark.parametrize(("scope", "may"), [("0\n", True), ("1\n", True), ("2\n", False), ("3\n", False)])
def test_yama_may_leave_others_memory_to_administrators(tmp_path, scope, may):
    yama = tmp_path / "ptrace_scope"
    yama.write_text(scope)
    assert may_access_peers(str(yama)) is may


def in_child(question):
    """The answer of a child that may not read others' memory."""
    child = os.fork()
    if child == 0:
        try:
            forbid_reading_others()
            os._exit(int(question()))
        finally:
            os._exit(2)
    return {0: False, 1: True}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def test_a_filter_may_forbid_it(tmp_path):
    assert may_access_peers(str(tmp_path / "none")) is True
    assert in_child(lambda: may_access_peers(str(tmp_path / "none"))) is False


def test_oneccl_is_found_where_it_is_installed():
    assert has_oneccl() is (LIBRARY is not None)


def test_one_of_the_paths_that_are_asked_for_must_be_open():
    ways = {path: is_available({"CPULAUNCH_CCL_PATH": path}) for path in ("auto", "memory", "oneccl")}
    assert ways["memory"] is may_access_peers()
    assert ways["oneccl"] is has_oneccl()
    assert ways["auto"] is is_available({}) is (ways["memory"] or ways["oneccl"])
    assert in_child(lambda: is_available({"CPULAUNCH_CCL_PATH": "memory"})) is False
    assert in_child(lambda: is_available({})) is has_oneccl()
