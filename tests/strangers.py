"""Another user without capabilities, in whose folder root works: what that user does, and the folder."""

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

UID, OVERFLOW = 12345, 65534
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can act as another user"
)


def as_other_user(action: Callable[[], object]) -> bool:
    """Whether the action succeeds as the other user: no OSError. Effect: carries it out in a child process."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            action()
            code = 0
        except OSError:
            code = 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1), "the action failed with another error than OSError"
    return code == 0


def as_stranger(action: Callable[[], object]) -> None:
    """Effect: carries out the action as the other user, in a child process. Raises: AssertionError if that fails."""
    assert as_other_user(action)


CLONE_NEWUSER, PR_SET_DUMPABLE = 0x10000000, 4


def enter_user_namespace(inside: int | None = 0) -> None:
    """Effect: as `unshare --user` does, with a number for this user alone; None: without. Raises: OSError."""
    user, libc = os.geteuid(), ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # Else root owns the files in /proc of a process that changed its user.
    if libc.unshare(CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "no user namespaces")
    if inside is not None:
        Path("/proc/self/uid_map").write_text(f"{inside} {user} 1")


def in_user_namespace(action: Callable[[], object], *, inside: int | None = 0) -> None:
    """Effect: carries out the action as the other user in a user namespace, whose files all others own alike."""
    if not as_other_user(enter_user_namespace):
        pytest.skip("users may make no user namespaces here")
    as_stranger(lambda: (enter_user_namespace(inside), action()))


def in_container(action: Callable[[], object]) -> None:
    """Effect: carries out the action as user 65534 of a user namespace in which the other user has no number.

    Files of both show 65534 there, as in a container of an ordinary user that runs programs as this one.
    """
    (entered, enter), (mapped, map_numbers) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 3 if ctypes.CDLL(None).unshare(CLONE_NEWUSER) else code
            os.write(enter, b"!")
            os.read(mapped, 1)
            os.setgroups([])
            os.setresgid(OVERFLOW, OVERFLOW, OVERFLOW)
            os.setresuid(OVERFLOW, OVERFLOW, OVERFLOW)
            action()
            code = 0
        except BaseException as error:  # noqa: BLE001 - pytest shows the text of any
            os.write(2, repr(error).encode())
        finally:
            os._exit(code)
    os.read(entered, 1)
    for kind in ("uid", "gid"):
        Path(f"/proc/{pid}/{kind}_map").write_text(f"0 0 1000\n{OVERFLOW} {OVERFLOW} 1\n")
    os.write(map_numbers, b"!")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for fd in (entered, enter, mapped, map_numbers):
        os.close(fd)
    if code == 3:
        pytest.skip("no user namespaces here")
    assert code == 0


def folder_of_stranger():
    """A new folder that the other user owns and reaches, as a context for a fixture."""
    folder = Path(tempfile.mkdtemp(prefix="strangers-", dir="/tmp"))
    os.chown(folder, UID, UID)
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


AS_STRANGER = f"""
import os
def as_stranger(action):
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid({UID}, {UID}, {UID})
            os.setresuid({UID}, {UID}, {UID})
            action()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
"""
"""The same for a worker's program, which so acts at the right moment: an attacker finds that moment by trying."""
