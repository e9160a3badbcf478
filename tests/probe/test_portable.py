"""Systems without /sys: a Host from psutil and py-cpuinfo, which are not imported on Linux."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cpulaunch.probe.portable import probe_portable


def test_a_host_without_sysfs() -> None:
    host = probe_portable()
    assert len(host.cpus) == psutil.cpu_count()
    assert host.limits.budget.cpus <= {cpu.id for cpu in host.cpus}
    assert host.limits.budget.threads == len(host.limits.budget.cpus)
    assert host.memory_bytes == psutil.virtual_memory().total
    assert host.cpu.model_name


@pytest.mark.skipif(sys.platform != "linux", reason="the launch path of Linux")
@pytest.mark.parametrize("module", ["psutil", "cpuinfo", "ctypes", "subprocess", "typer", "shutil", "tempfile", "json"])
def test_a_launch_imports_nothing_heavy(module: str) -> None:
    code = (
        "import sys; from cpulaunch.probe import Root, probe_host; "
        "probe_host(Root(), interpreter=sys.executable, detail='launch'); "
        f"print({module!r} in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


SPAWNED = """
import multiprocessing
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    from cpulaunch.probe.portable import read_cpuid_features
    print(bool(read_cpuid_features()))
"""


def test_what_py_cpuinfo_starts_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """Python starts new processes by `-c` where it does not fork them, as Python 3.14 does."""
    (tmp_path / "current").mkdir()
    (tmp_path / "current/threading.py").write_text("open('imported', 'w')\nraise SystemExit(1)\n")
    (tmp_path / "program.py").write_text(SPAWNED)
    command = [sys.executable, "-P", str(tmp_path / "program.py")]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path}
    subprocess.run(command, cwd=tmp_path / "current", env=environ, capture_output=True, timeout=60, check=False)
    assert not (tmp_path / "current/imported").exists()
