"""Systems without /sys: a Host from psutil and py-cpuinfo, which are not imported on Linux."""

import subprocess
import sys

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
