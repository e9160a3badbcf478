"""Another user without capabilities, in whose folder root works: what that user does, and the folder."""

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

UID = 12345
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
