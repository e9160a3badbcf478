"""The launch removes the shared memory of oneCCL that killed ranks leave behind."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from ccl_ranks import LIBRARY, environment, free_port

from cpulaunch.system.files.shared_memory import remove_shared_memory

DEADLINE_SECONDS = 300


def test_only_files_named_after_the_process_are_removed(tmp_path):
    user = os.getuid()
    own = (f"41:{user}:0", f"41:{user}:1", f"__KMP_REGISTERED_LIB_41_{user}")
    others = (f"141:{user}:0", f"4:{user}:0", f"41:{user + 1}:0", "41", f"__KMP_REGISTERED_LIB_4_{user}", f"{own[2]}0")
    for name in (*own, *others):
        (tmp_path / name).touch()
    remove_shared_memory(frozenset({41}), since=0, folder=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_a_missing_folder_is_not_an_error(tmp_path):
    remove_shared_memory(frozenset({41}), since=0, folder=str(tmp_path / "none"))


SUB_GROUP = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
group = dist.new_group([0, 1], backend="ccl")
if dist.get_rank() < 2:
    dist.all_reduce(torch.ones(4), group=group)
mine = [name for name in os.listdir("/dev/shm") if name.startswith(f"{os.getpid()}:")]
os.write(1, f"{os.getpid()} has {len(mine)}\\n".encode())
dist.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(LIBRARY is None or find_spec("torch") is None, reason="torch and oneCCL are not both installed")
def test_a_launch_removes_the_shared_memory_of_killed_ranks(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SUB_GROUP)
    process = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "--nproc-per-node", "3", "--max-restarts", "0", str(script)],
        env=environment(3, free_port()) | {"CPULAUNCH_CCL_PATH": "oneccl"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    printed = [line.split() for line in process.stdout.splitlines() if " has " in line]
    assert sorted(count for _, _, count in printed) == ["0", "1", "1"], process.stdout + process.stderr
    prefixes = tuple(f"{pid}:" for pid, _, _ in printed)
    assert [name for name in os.listdir("/dev/shm") if name.startswith(prefixes)] == []
