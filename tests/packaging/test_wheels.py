"""The files that scripts/build-wheels builds: which one pip selects, and what each installs without a compiler."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from builds import CCL, LIBRARIES, MKL, complete, copy_checkout, do_not_optimize, make_environment, run

import cpulaunch
from tests import json_output

NAME = f"cpulaunch-{cpulaunch.__version__}"
COMPILED = f"{NAME}-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
PURE, SOURCE = f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz"
ON_TWO_RANKS = ("--nproc-per-node", "2", "--dist-backend", "ccl")
PROGRAM = """
import os, re
import torch
from torch import distributed as dist
dist.init_process_group("ccl")
tensor = torch.ones(100_000)
dist.all_reduce(tensor)
with open("/proc/self/maps") as maps:
    loaded = sorted(set(re.findall(r"\\S+/libcpulaunch_\\w+\\.so", maps.read())))
if dist.get_rank() == 0:
    print(int(tensor.sum()), *loaded)
dist.destroy_process_group()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.uname().machine != "x86_64", reason="wheels are built on x86-64 Linux"
    ),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("pip", "hatchling"))), reason="pip and hatchling are not installed"
    ),
]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("wheels") / "source", optimized=True)


@pytest.fixture(scope="module")
def release(source: Path) -> Path:
    """The folder that scripts/build-wheels has filled."""
    run(source / "scripts/build-wheels", cwd=source.parent)
    return source / "dist"


class Installation:
    """A file installed by pip into its own environment; PATH has only the programs of that environment."""

    def __init__(self, file: Path, folder: Path) -> None:
        python = make_environment(folder / "environment")
        self.programs, self.program = python.parent, folder / "program.py"
        self.program.write_text(PROGRAM)
        options = ("--verbose", "--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir")
        pip = (sys.executable, "-m", "pip", "--python", python)
        result = complete(*pip, "install", *options, file, path=self.programs)
        assert result.returncode == 0, result.stderr
        self.pip_output = result.stderr
        package = run(python, "-P", "-c", "import cpulaunch; print(cpulaunch.__path__[0])")
        self.libraries = [str(Path(package.strip()).parent / library) for library in sorted((CCL, MKL))]

    def cpulaunch(self, *words: object) -> subprocess.CompletedProcess[str]:
        return complete(self.programs / "cpulaunch", *words, path=self.programs)

    def doctor(self, check: str) -> dict[str, str]:
        """The finding of this check (others may find problems of this machine)."""
        found = json_output.read("doctor", self.cpulaunch("doctor", "--json").stdout)["checks"]
        return next(each for each in found if each["check"] == check)


def test_a_release_has_an_archive_and_wheels_with_and_without_libraries(release: Path) -> None:
    assert sorted(path.name for path in release.iterdir()) == sorted([COMPILED, PURE, SOURCE])
    for wheel, expected in ((COMPILED, set(LIBRARIES)), (PURE, set())):
        with zipfile.ZipFile(release / wheel) as archive:
            assert {name for name in archive.namelist() if name.endswith(".so")} == expected


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("manylinux2014_x86_64", COMPILED), ("manylinux2014_aarch64", PURE), ("macosx_11_0_arm64", PURE)],
)
def test_pip_selects_the_wheel_for_the_platform(release: Path, tmp_path: Path, platform: str, expected: str) -> None:
    options = ("--no-index", "--find-links", release, "--no-deps", "--only-binary", ":all:", "--platform", platform)
    run(sys.executable, "-m", "pip", "download", *options, "--dest", tmp_path, "cpulaunch")
    assert [path.name for path in tmp_path.iterdir()] == [expected]


@needs_torch
@pytest.mark.torch
def test_wheel_has_the_libraries_of_ranks_without_a_compiler(release: Path, tmp_path: Path) -> None:
    installed = Installation(release / COMPILED, tmp_path)
    ranks = installed.cpulaunch(*ON_TWO_RANKS, "--mkl-dispatch", "on", installed.program)
    assert ranks.stdout.split() == ["200000", *installed.libraries], ranks.stderr
    assert "compiler" not in str(installed.doctor("collectives"))


@needs_torch
@pytest.mark.torch
def test_source_archive_works_without_a_compiler_and_reports_missing_features(release: Path, tmp_path: Path) -> None:
    installed = Installation(release / SOURCE, tmp_path)
    features = "--mkl-dispatch, fast collectives on one host and --weights"
    missing = f"built without {features}: no C compiler (CC, cc, gcc, clang)"
    assert missing in installed.pip_output
    ranks = installed.cpulaunch(*ON_TWO_RANKS, installed.program)
    assert ranks.stdout.split() == ["200000"], ranks.stderr
    assert "installed without a C compiler" in installed.doctor("collectives")["why"]
    plan = installed.cpulaunch("plan", "--mkl-dispatch", "on", installed.program)
    assert plan.returncode == 2
    assert "the MKL dispatch library is not installed" in plan.stderr


def test_no_wheel_is_built_without_a_library(source: Path, release: Path, tmp_path: Path) -> None:
    (source / "cpulaunch/lib/mkl_dispatch.c").write_text("#error not on this machine\n")
    do_not_optimize(source)
    result = complete(source / "scripts/build-wheels", tmp_path)
    assert result.returncode == 1
    assert "built without --mkl-dispatch" in result.stderr
    assert not list(tmp_path.iterdir())
