"""Contents of real builds: the profiles and the compiled libraries, or a pure wheel without a C compiler."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from builds import LIBRARIES, LINEAR, MKL, ROOT, copy_checkout, make_environment, run

SHARED = {
    *(f"share/man/man1/{path.name}" for path in (ROOT / "docs/man").iterdir()),
    "share/bash-completion/completions/cpulaunch",
    "share/zsh/site-functions/_cpulaunch",
    "share/fish/vendor_completions.d/cpulaunch.fish",
}
"""What a wheel installs below the environment."""
PROFILES = sorted(path.name for path in (ROOT / "profiles").glob("*.toml"))
HAS_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("pip", "hatchling", "editables"))),
        reason="pip, hatchling and editables are not installed in this environment",
    ),
]
needs_compiler = pytest.mark.skipif(
    not (HAS_COMPILER and sys.platform == "linux" and os.uname().machine == "x86_64"),
    reason="the libraries are built on x86_64 Linux with a C compiler only",
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the checkout, so that builds do not change the real one."""
    return copy_checkout(tmp_path / "source")


def build_wheel(source: Path, target: Path, path: str | None = None) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", target]
    run(sys.executable, "-m", "pip", "wheel", *options, source, path=path)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the checkout, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = copy_checkout(folder / "source")
    return source, build_wheel(source, folder / "dist")


def profiles_in(names: list[str]) -> list[str]:
    return sorted(Path(name).name for name in names if "cpulaunch/profiles/" in name and name.endswith(".toml"))


@needs_compiler
def test_wheel_has_the_libraries_and_is_named_for_its_platform(built: tuple[Path, Path], tmp_path: Path) -> None:
    source, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        mkl, ccl, linear = (archive.extract(library, tmp_path) for library in LIBRARIES)
        assert profiles_in(archive.namelist()) == PROFILES
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    assert ctypes.CDLL(mkl).mkl_serv_intel_cpu_true() == 1
    assert ctypes.CDLL(ccl).cpulaunch_ccl_version() > 0
    assert Path(linear).stat().st_size > 0
    assert not any((source / library).exists() for library in LIBRARIES)


def test_wheel_without_a_compiler_is_pure(source: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    wheel = build_wheel(source, tmp_path / "dist", path=str(empty))
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not set(LIBRARIES) & set(archive.namelist())
        assert profiles_in(archive.namelist()) == PROFILES
        assert {name.partition(".data/data/")[2] for name in archive.namelist()} - {""} == SHARED


def test_wheel_with_a_failing_compiler_is_pure(source: Path, tmp_path: Path) -> None:
    compilers = tmp_path / "bin"
    compilers.mkdir()
    (compilers / "cc").symlink_to(shutil.which("false") or "/bin/false")
    wheel = build_wheel(source, tmp_path / "dist", path=str(compilers))
    assert wheel.name.endswith("-py3-none-any.whl")


@needs_compiler
def test_wheel_has_the_library_that_can_be_compiled(source: Path, tmp_path: Path) -> None:
    (source / "cpulaunch/lib/ccl_memory.c").write_text("#error not on this machine\n")
    wheel = build_wheel(source, tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        assert set(LIBRARIES) & set(archive.namelist()) == {MKL, LINEAR}


def test_wheel_from_the_source_archive_is_the_same(built: tuple[Path, Path], tmp_path: Path) -> None:
    source, from_checkout = built
    build = "import hatchling.build, os, sys; os.chdir(sys.argv[1]); print(hatchling.build.build_sdist(sys.argv[2]))"
    name = run(sys.executable, "-c", build, source, tmp_path).splitlines()[-1]
    with tarfile.open(tmp_path / name) as archive:
        assert profiles_in(archive.getnames()) == PROFILES
        assert not [member for member in archive.getnames() if member.endswith(".so")]
    from_archive = build_wheel(tmp_path / name, tmp_path / "indirect")
    assert from_archive.name == from_checkout.name
    with zipfile.ZipFile(from_checkout) as direct, zipfile.ZipFile(from_archive) as indirect:
        assert sorted(indirect.namelist()) == sorted(direct.namelist())


def test_editable_installation_finds_profiles_and_libraries(source: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment")
    options = ["--no-deps", "--no-build-isolation", "--editable", source]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options)
    package = Path(run(python, "-P", "-c", "import cpulaunch; print(cpulaunch.__path__[0])").strip())
    assert package == source / "cpulaunch"
    assert sorted(path.name for path in (package / "profiles").glob("*.toml")) == PROFILES
    assert [(source / library).exists() for library in LIBRARIES] == [HAS_COMPILER] * len(LIBRARIES)


@needs_compiler
def test_the_library_of_collectives_is_refused_on_other_processors() -> None:
    command = ["cc", "-fsyntax-only", "-U__x86_64__", "cpulaunch/lib/ccl_memory.c"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the library of collectives is for x86-64 only" in done.stderr
