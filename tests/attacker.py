"""Code that runs as another user, for tests of what such a user can do."""

import os
import sys
from collections.abc import Callable

import pytest

UID = 65534
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can act as another user"
)


def as_other_user(action: Callable[[], object]) -> bool:
    """Whether the action succeeds as user UID, who has no capabilities. Effect: runs it in a forked child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            action()
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
