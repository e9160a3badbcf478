"""A seccomp filter that forbids a process to read the memory of others, as a container may have."""

import ctypes


class Instruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint32))


class Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction)))


def forbid_reading_others():
    """Effect: forbids process_vm_readv and process_vm_writev, as old versions of Docker do. Source: seccomp(2)."""
    load, equal, end, refuse, allow = 0x20, 0x15, 0x06, 0x00050001, 0x7FFF0000
    steps = [(load, 0, 0, 0), (equal, 2, 0, 310), (equal, 1, 0, 311), (end, 0, 0, allow), (end, 0, 0, refuse)]
    instructions = (Instruction * len(steps))(*steps)
    program = Filter(len(steps), instructions)
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP
