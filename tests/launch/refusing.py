"""Run by the tests: `refusing.py CALL ERRNO COMMAND…` executes a command for which the kernel refuses a system call.

As a container's seccomp profile does it, for real: a BPF program of six instructions.
"""

import ctypes
import os
import platform
import struct
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBERS = {
    "x86_64": {"set_mempolicy": 238, "get_mempolicy": 239, "sched_setaffinity": 203, "prctl": 157},
    "aarch64": {"set_mempolicy": 237, "get_mempolicy": 236, "sched_setaffinity": 122, "prctl": 167},
}


def refuse(calls, errno):
    """Source: seccomp(2); struct sock_filter {u16 code; u8 jt, jf; u32 k}."""
    program = [struct.pack("HBBI", LOAD_NUMBER, 0, 0, 0)]
    for number in calls:
        program.append(struct.pack("HBBI", JUMP_IF_EQUAL, 0, 1, number))
        program.append(struct.pack("HBBI", RETURN, 0, 0, ERRNO | errno))
    program.append(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header) == 0, os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    numbers = NUMBERS[platform.machine()]
    refuse([numbers[name] for name in sys.argv[1].split(",")], int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])
