"""Calls of the C library."""

import os
import sys

import pytest

from cpulaunch.system.libc import call, private_pipe, refuse_core_dumps

GET_DUMPABLE = 3
"""Source: Linux, include/uapi/linux/prctl.h."""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_process_refuses_core_dumps() -> None:
    child = os.fork()
    if not child:
        refuse_core_dumps()
        os._exit(call("prctl", GET_DUMPABLE, 0, 0, 0, 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere any pipe will do")
def test_a_private_pipe_ends_with_its_writer_and_cannot_be_opened() -> None:
    read, write = private_pipe()
    assert not os.get_inheritable(read)
    assert not os.get_inheritable(write)
    for fd in (read, write):
        with pytest.raises(OSError, match="No such device or address"):
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_NONBLOCK)
    os.write(write, b"ab")
    os.close(write)
    assert [os.read(read, 4) for _ in range(2)] == [b"ab", b""]
    os.close(read)
