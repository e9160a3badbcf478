"""Programs that are measured or emitted where another user put files with names of commands into the folder."""

import os
import subprocess
import sys

import pytest

from cpulaunch.launch.process.program import find_executable
from cpulaunch.records.errors import NotFoundError
from tests import json_output
from tests.strangers import UID, needs_root

pytestmark = needs_root
MEASURE = {
    "compare": ("compare", "--rounds", "1", "--wall-time", "--"),
    "compare python": ("compare", "--rounds", "1", "--wall-time", "python", "--"),
    "tune": ("tune", "--trials", "1", "--minutes", "0.1", "--wall-time", "--vary", "threads=1"),
    "diagnose": ("diagnose", "--steps", "2", "--budget", "60"),
    "diagnose --defaults": ("diagnose", "--steps", "2", "--budget", "60", "--defaults"),
}


@pytest.fixture
def shared(tmp_path):
    """A folder that all may write, with another user's "python" and "uvicorn", and the user's own script."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    for name in ("python", "uvicorn"):
        (folder / name).write_text("open('strangers_code_ran', 'w')\n")
        (folder / name).chmod(0o755)
        os.chown(folder / name, UID, UID)
    (folder / "own.py").write_text("open('own_code_ran', 'a').write('!')\n")
    return folder


@pytest.fixture
def cpulaunch(shared, tmp_path):
    """A function that runs cpulaunch there."""
    folder = os.path.dirname(sys.executable)
    environ = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*words, **variables):
        command = [sys.executable, "-P", "-m", "cpulaunch", *words]
        done = subprocess.run(
            command, cwd=shared, env=environ | variables, capture_output=True, text=True, timeout=240, check=False
        )
        assert not (shared / "strangers_code_ran").exists(), done.stderr
        return done

    return run


@pytest.mark.parametrize("name", MEASURE)
def test_what_is_measured_is_what_a_launch_runs(cpulaunch, shared, name):
    done = cpulaunch(*MEASURE[name], "python", "own.py")
    assert (shared / "own_code_ran").exists(), done.stderr
    assert (done.returncode == 0) == (not name.startswith("diagnose")), done.stderr  # It makes no steps.


@pytest.mark.parametrize("name", MEASURE)
def test_a_name_that_is_no_command_is_refused_before_anything_is_measured(cpulaunch, name):
    done = cpulaunch(*MEASURE[name], "uvicorn", "app:app")
    assert (done.returncode, done.stdout) == (127, "")
    assert "uvicorn" in done.stderr
    assert "to use that of the current folder, in which others may write, write ./uvicorn" in done.stderr


@pytest.mark.parametrize(
    ("mode", "file_mode", "owner", "clause"),
    [
        (0o1777, 0o755, UID, ", in which others may write"),
        (0o777, 0o777, 0, ", in which others may write"),
        (0o775, 0o755, UID, ", though another user owns it"),
        (0o775, 0o755, 0, ""),
        (0o755, 0o755, 0, ""),
    ],
)
def test_the_hint_says_why_a_name_alone_does_not_stand_for_a_file(shared, monkeypatch, mode, file_mode, owner, clause):
    monkeypatch.chdir(shared)
    (shared / "uvicorn").chmod(file_mode)
    os.chown(shared / "uvicorn", owner, owner)
    shared.chmod(mode)
    with pytest.raises(NotFoundError) as caught:
        find_executable("uvicorn", {"PATH": "/missing"})
    assert caught.value.hint == f"to use that of the current folder{clause}, write ./uvicorn"


def test_a_shell_script_starts_what_a_launch_runs(cpulaunch, shared):
    text = cpulaunch("plan", "--emit", "sh", "python", "own.py").stdout
    subprocess.run(["sh", "-c", text], cwd=shared, timeout=60, check=True)
    assert (shared / "own_code_ran").exists()
    assert not (shared / "strangers_code_ran").exists()
    for words in (["uvicorn", "app:app"], ["--no-python", "nosuch"], ["nosuch.py"]):
        done = cpulaunch("plan", "--emit", "sh", *words)
        assert (done.returncode, done.stdout) == (127, ""), words


@pytest.mark.parametrize("form", ["slurm", "k8s"])
def test_a_program_that_only_another_machine_may_have_is_a_warning(cpulaunch, form):
    done = cpulaunch("plan", "--emit", form, "uvicorn", "app:app")
    assert (done.returncode, "uvicorn app:app" in done.stdout or "app:app" in done.stdout) == (0, True)
    assert "cpulaunch: warning: command not found: uvicorn" in done.stderr


def test_the_warnings_of_a_plan_are_said_beside_the_emitted_text(cpulaunch):
    done = cpulaunch("plan", "--emit", "sh", "own.py", OMP_DYNAMIC="true")
    planned = cpulaunch("plan", "--json", "own.py", OMP_DYNAMIC="true").stdout
    (warning,) = json_output.read("plan", planned)["warnings"]
    assert (done.returncode, done.stderr) == (0, f"cpulaunch: warning: {warning}\n")
