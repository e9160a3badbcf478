"""Helpers of the packaging tests: a copy of the checkout, commands with a given PATH, new environments."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
MKL, CCL, LINEAR = LIBRARIES = (
    "cpulaunch/lib/libcpulaunch_mkl.so",
    "cpulaunch/lib/libcpulaunch_ccl.so",
    "cpulaunch/lib/libcpulaunch_linear.so",
)
OPTIMIZED = '"-O3"'
IGNORED = (".git", ".venv*", "*.so", "__pycache__", ".*_cache", ".hypothesis", "dist", "tests")


def copy_checkout(target: Path, *, optimized: bool = False) -> Path:
    """A copy of the checkout without build products, so that builds do not change the real one.

    Unless `optimized`, the libraries are compiled without optimization, which takes a quarter of the time.
    """
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
    if not optimized:
        do_not_optimize(target)
    return target


def do_not_optimize(checkout: Path) -> None:
    """Effect: the libraries of this copy are compiled without optimization from now on."""
    hook = checkout / "scripts/build_hook.py"
    flags = hook.read_text()
    assert OPTIMIZED in flags
    hook.write_text(flags.replace(OPTIMIZED, '"-O0"'))


def complete(*command: object, path: object = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The completed command. `path` is its PATH."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    if path is not None:
        environment["PATH"] = str(path)
    return subprocess.run(list(map(str, command)), env=environment, cwd=cwd, capture_output=True, text=True)


def run(*command: object, path: object = None, cwd: Path | None = None) -> str:
    """Standard output of the command, whose exit code must be 0. `path` is its PATH."""
    result = complete(*command, path=path, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def make_environment(target: Path) -> Path:
    """The interpreter of a new environment that can import the packages of this one, except cpulaunch."""
    run(sys.executable, "-m", "venv", "--without-pip", target)
    python = target / "bin/python"
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site_packages / "build_tools.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
