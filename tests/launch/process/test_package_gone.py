"""A launch whose package or Python is replaced or removed meanwhile, as by `pip install -U`, ends as any other."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import DEADLINE_SECONDS, alive, eventually

PACKAGE = Path(__file__).parents[3] / "cpulaunch"
IMPORT_SECONDS = 2
"""After its workers have started, the launcher imports in milliseconds what its end needs."""

PROGRAM = f"""
import os, signal, subprocess, sys, time
time.sleep({IMPORT_SECONDS})
try:
    os.rename("packages/dynload", "packages/gone-dynload")
    os.rename("packages/cpulaunch", "packages/gone")
except OSError:
    pass  # Another worker did it.
"""
CUSTOMIZE = """
import os, sys
folder = os.path.join(os.path.dirname(__file__), "dynload")
sys.path = [folder if path.endswith("lib-dynload") else path for path in sys.path]
"""
"""The compiled modules of the standard library are in a folder that can be removed, as if it were unmounted."""
ENDS = {
    "succeeds": ("sys.exit(0)", 0, ""),
    "fails": ("sys.exit(3)", 3, "exit code 3"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
}


@pytest.fixture
def start(tmp_path):
    """Starts a launch from a copy of the package that the program in it may remove."""
    shutil.copytree(PACKAGE, tmp_path / "packages/cpulaunch", ignore=shutil.ignore_patterns("__pycache__"))
    compiled = next((path for path in sys.path if path.endswith("lib-dynload")), str(tmp_path))
    (tmp_path / "packages/dynload").symlink_to(compiled)
    (tmp_path / "packages/sitecustomize.py").write_text(CUSTOMIZE)
    (tmp_path / "runs").mkdir()
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "packages"), "TMPDIR": str(tmp_path / "runs")}

    def start(program, *options):
        (tmp_path / "program.py").write_text(PROGRAM + program)
        return subprocess.Popen(
            [sys.executable, "-m", "cpulaunch", *options, "program.py"],
            cwd=tmp_path,
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("options", [("--instances", "1"), ("--nproc-per-node", "1")], ids=" ".join)
def test_its_result_is_reported(start, tmp_path, end, options):
    program, code, text = ENDS[end]
    process = start(program, *options, "--report", "report.json", "--html", "page.html")
    errors = process.communicate(timeout=DEADLINE_SECONDS)[1]
    assert process.returncode == code, errors
    assert text in errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == code
    assert "</html>" in (tmp_path / "page.html").read_text()
    assert list((tmp_path / "runs").iterdir()) == []


DAEMON = """
null = subprocess.DEVNULL
process = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=null, stderr=null)
open(f"/dev/shm/{process.pid}:{os.getuid()}:test", "w").close()
open("daemon.new", "w").write(str(process.pid))
os.rename("daemon.new", "daemon")
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux's /dev/shm")
def test_nothing_is_left_after_its_supervisor_is_killed(start, tmp_path):
    process = start(DAEMON, "--instances", "1", "--log-dir", "logs", "--report", "report.json")
    errors = process.communicate(timeout=DEADLINE_SECONDS)[1]
    assert process.returncode == 137, errors
    assert "Traceback" not in errors
    daemon = int((tmp_path / "daemon").read_text())
    eventually(lambda: not alive(daemon), "the end of the daemon")
    assert not os.path.exists(f"/dev/shm/{daemon}:{os.getuid()}:test")
    assert list((tmp_path / "runs").iterdir()) == []
