"""Calls of the C library."""

import os
import sys

import pytest

from cpulaunch.system.libc import call, refuse_core_dumps

GET_DUMPABLE = 3
"""Source: Linux, include/uapi/linux/prctl.h."""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_process_refuses_core_dumps() -> None:
    child = os.fork()
    if not child:
        refuse_core_dumps()
        os._exit(call("prctl", GET_DUMPABLE, 0, 0, 0, 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
