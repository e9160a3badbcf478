"""Another user without capabilities, in whose folder root works: what that user does, and the folder."""

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
