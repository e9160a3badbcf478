"""Helper interpreters import nothing from the current folder, where another user may have put a json.py."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cpulaunch.doctor.facts import read_untrusted_code
from cpulaunch.doctor.software import code_of_others
from cpulaunch.doctor.torch_report import REPORT_PROGRAM
from cpulaunch.probe import Root, probe_host
from cpulaunch.records.host import Torch
from tests.doctor.facts import facts

SHADOWED = (
    "json",
    "__future__",
    "torch",
    "signal",
    "random",
    "socket",
    "struct",
    "re",
    "subprocess",
    "typing",
    "tomllib",
    "select",
)
HOSTILE = "open({marker!r}, 'a').write(__name__ + '\\n'); raise SystemExit(66)\n"


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that modules in the current folder, named as those of the standard library, write to when imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(HOSTILE.format(marker=str(tmp_path / "marker")))
    monkeypatch.chdir(folder)
    return tmp_path / "marker"


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=100)


@pytest.mark.parametrize("python_path", [None, ""])
def test_doctors_report_of_torch(marker: Path, python_path: str | None) -> None:
    """Only its imports count here: it ends at the first module of torch."""
    environ = {} if python_path is None else {"PYTHONPATH": python_path}
    stop = "import json; json.dumps({})\nimport importlib.util; importlib.util.find_spec('torch')\nraise SystemExit\n"
    run(sys.executable, "-c", REPORT_PROGRAM.replace("import json\n", stop, 1), **environ)
    assert not marker.exists()


@pytest.mark.parametrize("words", [["plan", "--json", "x.py"], ["profiles", "validate", "x.toml"], ["--version"]])
def test_cpulaunch_as_a_module(marker: Path, words: list[str]) -> None:
    Path("x.toml").write_text("x = 1\n")
    done = run(sys.executable, "-m", "cpulaunch", *words)
    assert not marker.exists()
    assert "Traceback" not in done.stderr


def test_the_port_of_an_emitted_script(marker: Path) -> None:
    Path("x.py").touch()
    script = run(
        sys.executable, "-P", "-m", "cpulaunch", "plan", "--nproc-per-node", "2", "--emit", "sh", "x.py"
    ).stdout
    line = next(line for line in script.splitlines() if line.startswith("MASTER_PORT="))
    done = run("/bin/sh", "-c", f"{line}\necho $MASTER_PORT")
    assert re.fullmatch(r"\d+\n", done.stdout)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["__init__.py", "lib/libtorch_cpu.so", "__pycache__/x.pyc", "lib"])
def test_doctor_names_a_file_of_torch_that_others_can_change(tmp_path: Path, name: str) -> None:
    for each in ("__init__.py", "lib/libtorch_cpu.so", "__pycache__/x.pyc"):
        (tmp_path / "torch" / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / each).touch(mode=0o644)
    host = replace(facts().host, torch=Torch(version="2.13.0", path=f"{tmp_path}/torch"))
    assert read_untrusted_code(host, sys.executable) == ()
    (tmp_path / "torch" / name).chmod(0o777)
    assert read_untrusted_code(host, sys.executable) == (f"{tmp_path}/torch/{name} may be written by everyone",)


def test_doctor_names_a_python_that_others_can_change(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    folder.chmod(0o777)
    host = probe_host(Root(), interpreter=sys.executable, environ={}, detail="launch")
    found = read_untrusted_code(host, str(folder / "python"))
    assert found[0] == f"{folder} may be written by everyone"
    advice = code_of_others(replace(facts(), live=True, untrusted_code=found))
    assert (advice[0].status, advice[0].found) == ("advice", found[0])
