"""A job of ranks starts as soon as any launch: its modules import little. See also tests/test_architecture.py."""

import subprocess
import sys

from jobs import HERE

HEAVY = (
    *("typing", "re", "dataclasses", "contextlib", "json", "pathlib", "subprocess"),
    *("socket", "selectors", "uuid", "random", "tempfile", "shutil", "string", "logging"),
)
JOB = "import cpulaunch.cli.main, cpulaunch.cli.run, cpulaunch.plan.planner, cpulaunch.launch.ranks.engine"


def test_a_job_imports_little():
    code = f"import sys; sys.path.insert(0, {str(HERE.parents[2])!r}); {JOB}"
    loaded = f"{code}; print(*(m for m in {HEAVY} if m in sys.modules))"
    out = subprocess.run([sys.executable, "-I", "-S", "-c", loaded], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []
