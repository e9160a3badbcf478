"""Whether a process has ended, by /proc."""

import os
from pathlib import Path

import pytest

from cpulaunch.system.libc import is_linux
from cpulaunch.system.process_state import all_threads_ended


@pytest.mark.skipif(not is_linux(), reason="needs /proc")
@pytest.mark.parametrize("namespace", ["own", "other"])
def test_the_proc_of_another_pid_namespace_tells_of_no_end(namespace: str, tmp_path: Path) -> None:
    """There the number is that of another process, which has ended here."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    own = os.getpid()
    (tmp_path / "self").symlink_to(str(own if namespace == "own" else own + 1))
    (tmp_path / str(child)).symlink_to(f"/proc/{child}")
    assert all_threads_ended(child, proc=str(tmp_path)) == (namespace == "own")
    os.waitpid(child, 0)
