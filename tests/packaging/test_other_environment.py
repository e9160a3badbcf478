"""cpulaunch in one environment, as pipx and `uv tool` install it, and torch in another one that is active."""

import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from builds import copy_checkout, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("pip", "hatchling", "torch"))),
        reason="pip, hatchling and torch are not all installed in this environment",
    ),
]
TORCH, TOOL = ("torch", "functorch"), ("typer", "psutil", "cpuinfo", "py_cpuinfo")
"""Packages that only the environment with torch has, and those that only cpulaunch's has."""
PROGRAM = """\
import sys
import torch
import cpulaunch
print(sys.executable, torch.get_num_threads(), cpulaunch.__file__, "psutil" in sys.modules, sep="|")
"""


class Environments:
    """The tool's environment (`tool`), one with torch (`work`) and an empty one (`bare`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tool", "work", "bare"):
            run(sys.executable, "-m", "venv", "--without-pip", folder / name)
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if path.suffix == ".pth" or path.name.startswith(("cpulaunch", "_editable", "__pycache__")):
                continue
            if not path.name.startswith(TORCH):
                self.link(path, "tool")
            if not path.name.startswith(TOOL):
                self.link(path, "work")
        source = copy_checkout(folder / "source")
        pip, quick = (sys.executable, "-m", "pip"), ("--no-deps", "--no-index", "--quiet")
        run(*pip, "wheel", *quick, "--no-build-isolation", "--wheel-dir", folder, source)
        run(*pip, "--python", folder / "tool/bin/python", "install", *quick, next(folder.glob("*.whl")))

    def link(self, path: Path, name: str) -> None:
        """Effect: the environment has this package too."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (self.folder / name / "lib" / version / "site-packages" / path.name).symlink_to(path)

    def cpulaunch(self, *words: str, active: str | None) -> subprocess.CompletedProcess[str]:
        """The completed command of the tool's environment, with another one active."""
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder)}
        if active is not None:
            prefix = self.folder / active
            environ |= {"VIRTUAL_ENV": str(prefix), "PATH": f"{prefix}/bin:/usr/bin:/bin"}
        command = [str(self.folder / "tool/bin/cpulaunch"), *words]
        return subprocess.run(command, env=environ, cwd=self.folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    made = Environments(tmp_path_factory.mktemp("environments"))
    (made.folder / "infer.py").write_text(PROGRAM)
    return made


def test_the_active_environment_runs_the_program_with_the_plugin(environments: Environments) -> None:
    result = environments.cpulaunch("--threads", "1", "--precision", "tf32", "infer.py", active="work")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    python, threads, package, psutil = result.stdout.strip().split("|")
    assert (python, threads, psutil) == (str(environments.folder / "work/bin/python"), "1", "False")
    assert package.startswith(str(environments.folder / "tool"))


def test_the_plan_says_which_python_and_why(environments: Environments) -> None:
    plan = json.loads(environments.cpulaunch("plan", "--json", "infer.py", active="work").stdout)
    (note,) = [note for note in plan["notes"] if note["setting"] == "python"]
    assert (note["value"], note["origin"]) == (str(environments.folder / "work/bin/python"), "environment")
    assert note["reason"].startswith("the active virtual environment, by VIRTUAL_ENV; torch 2.")
    assert plan["warnings"] == []


@pytest.mark.parametrize("active", [None, "bare"])
def test_a_missing_torch_is_said_before_the_start(environments: Environments, active: str | None) -> None:
    python = environments.folder / (active or "tool") / "bin/python"
    result = environments.cpulaunch("infer.py", active=active)
    first, *others = result.stderr.splitlines()
    assert result.returncode == 1
    assert first.startswith(f"cpulaunch: warning: {python} (")
    assert ") has no torch: install it there, activate the environment that has it, or name" in first
    assert others[-1] == "ModuleNotFoundError: No module named 'torch'"
    strict = environments.cpulaunch("--strict", "infer.py", active=active)
    assert (strict.returncode, strict.stdout) == (125, "")


def test_an_environment_may_be_named(environments: Environments) -> None:
    work = str(environments.folder / "work")
    for named in (work, f"{work}/bin/python3"):
        plan = json.loads(environments.cpulaunch("plan", "--json", "--python", named, "infer.py", active="bare").stdout)
        assert plan["workers"][0]["argv"][0].startswith(f"{work}/bin/python")
    result = environments.cpulaunch("--python", "nowhere/bin/python", "infer.py", active="work")
    assert result.returncode == 127
    assert "Python interpreter not found: nowhere/bin/python" in result.stderr


def test_ranks_run_there_with_the_backend_that_only_the_plugin_registers(environments: Environments) -> None:
    (environments.folder / "ranks.py").write_text(
        "import torch\nfrom torch import distributed as dist\ndist.init_process_group('ccl')\n"
        "tensor = torch.ones(1000)\ndist.all_reduce(tensor)\n"
        "print(int(tensor.sum()))\ndist.destroy_process_group()\n"
    )
    result = environments.cpulaunch("torchrun", "--nproc-per-node", "2", "ranks.py", active="work")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["2000", "2000"]


def test_doctor_checks_the_active_environment(environments: Environments) -> None:
    checks = json.loads(environments.cpulaunch("doctor", "--json", active="bare").stdout)["checks"]
    found = {check["check"]: check for check in checks}
    assert found["Python"]["found"].startswith(str(environments.folder / "bare/bin/python"))
    assert found["torch"]["fix"].startswith(f"{environments.folder}/bare/bin/python -m pip install torch")
    assert found["plugin"]["status"] == "skipped"
