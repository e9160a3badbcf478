"""The plugin in Pythons in which cpulaunch is not installed, of other versions, found through PYTHONPATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cpulaunch.probe.software.interpreters import OLDEST_PYTHON, PLUGIN_FOLDER
from cpulaunch.worker import autoload

VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
PROGRAM = """
import importlib, os, pkgutil, sys
from importlib.metadata import entry_points
found = entry_points()
found = found.select(group="torch.backends") if hasattr(found, "select") else found.get("torch.backends", [])
for setting in (None, "{"):
    if setting is not None:
        os.environ["CPULAUNCH_WORKER"] = setting
    for each in found:
        each.load()()
import cpulaunch
print(len(found), cpulaunch.__file__, "cpulaunch.worker.apply" in sys.modules)
if sys.version_info >= (3, 10):
    for module in pkgutil.walk_packages([os.path.join(cpulaunch.__path__[0], "worker")], "cpulaunch.worker."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name in ("torch", "numpy"), (module.name, error)
"""


def interpreter(version: str) -> str | None:
    """A Python of this version on this machine; None if there is none."""
    name = f"python{version}"
    found = [shutil.which(name), *Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")]
    return next((str(path) for path in found if path and "/shims/" not in str(path)), None)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plugin_is_found_and_runs_or_does_nothing(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    environ = {"PYTHONPATH": PLUGIN_FOLDER, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run([python, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    count, file, applied = ran.stdout.split()
    package = Path(PLUGIN_FOLDER).parent
    assert (count, Path(file)) == ("1", package / "__init__.py")
    assert applied == str(tuple(map(int, version.split("."))) >= OLDEST_PYTHON)


def test_the_launcher_and_the_plugin_name_the_same_oldest_python() -> None:
    assert autoload.OLDEST_PYTHON == OLDEST_PYTHON
