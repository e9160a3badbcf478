"""A worker the kernel killed at its cgroup's memory limit is named as such."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from control_groups import ControlGroup

GREEDY = """
kept = []
print("taking memory", flush=True)
while True:
    kept.append(b"x" * (8 << 20))
"""
LIMIT_MIB = 120

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's"),
]


@pytest.mark.parametrize("instances", ["1", "2"])
def test_summary_says_out_of_memory(new_group: Callable[[str], ControlGroup], tmp_path: Path, instances: str) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY)
    group = new_group("memory")
    group.limit_memory(LIMIT_MIB)
    options = ["--allocator", "default", "--openmp", "default", "--log-dir", tmp_path / "logs", "--oversubscribe"]
    result = group.run([sys.executable, "-m", "cpulaunch", *options, "--instances", instances, script])
    assert result.returncode == 137, result.stderr
    assert "SIGKILL" in result.stderr
    assert "out of memory" in result.stderr
    assert "taking memory" in result.stdout
