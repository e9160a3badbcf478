"""Which Python runs the workers: tables of active environments, with and without torch."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from cpulaunch.probe.software import interpreters
from cpulaunch.probe.software.interpreters import (
    PLUGIN_FOLDER,
    OwnPython,
    choose_python,
    missing_torch,
    with_plugin_path,
)
from cpulaunch.records.host import Torch
from cpulaunch.records.request import Program, WorkerPython
from cpulaunch.system.root import Root
from tests.plan.machines import SCRIPT, machine, replace
from tests.strangers import OVERFLOW, UID, in_container, needs_root


def make_environment(prefix: Path, *, torch: bool, version: str = "3.12", virtual: bool = True) -> Path:
    """The folder of an environment made of empty files."""
    site = prefix / f"lib/python{version}/site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch/version.py").write_text("__version__ = '2.13.0'" if torch else "")
    (prefix / "bin").mkdir()
    (prefix / "bin/python").write_text("")
    if virtual:
        (prefix / "pyvenv.cfg").write_text(f"version = {version}.1\n")
    return prefix


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("with", "without", "own", "own_with", "base", "base_without"):
        make_environment(tmp_path / name, torch=("with" in name and "without" not in name) or name == "base")
    for name in ("base", "base_without"):
        (tmp_path / name / "condabin").mkdir()
    return tmp_path


TABLE = [
    # cpulaunch's own, VIRTUAL_ENV, CONDA_PREFIX, in PATH -> what runs, words of the reason, words of the notice
    ("own", None, None, "", "own", "cpulaunch's own environment", ""),
    ("own", "with", None, "", "with", "the active virtual environment, by VIRTUAL_ENV", ""),
    ("own", None, "with", "", "with", "the active conda environment, by CONDA_PREFIX", ""),
    ("own", "without", None, "", "without", "the active virtual environment", ""),
    ("own", "own", None, "", "own", "which is the active virtual environment", ""),
    ("own_with", "without", None, "", "own_with", "has no torch", "has no torch: cpulaunch's own Python runs"),
    ("own_with", "with", None, "", "with", "the active virtual environment", ""),
    ("own_with", "with", None, "own_with:with", "own_with", "first in PATH", ""),
    ("own_with", "with", None, "with:own_with", "with", "the active virtual environment", ""),
    ("own", "with", None, "own:with", "with", "the active virtual environment", ""),
    ("own_with", None, "base", "base", "own_with", "not conda's base environment", ""),
    ("own_with", None, "base_without", "", "own_with", "conda's base environment", ""),
    ("own", None, "base", "", "base", "conda's base environment", ""),
    ("own", "with", "base", "", "with", "the active virtual environment", ""),
    ("own", "with", "without", "without:with", "without", "the active conda environment", ""),
    ("own", "with", "without", "with:without", "with", "the active virtual environment", ""),
    ("own", "gone", None, "", "own", "own environment", "not an environment with a Python, and ignored: VIRTUAL_ENV="),
    ("own", "gone", "with", "", "with", "the active conda environment", "ignored: VIRTUAL_ENV="),
    ("own_with", "own_with", "base", "", "own_with", "which is the active virtual environment", ""),
]


@pytest.mark.parametrize(("own", "virtual", "conda", "path", "expected", "reason", "notice"), TABLE)
def test_the_python_of_the_workers(
    folder: Path, own: str, virtual: str | None, conda: str | None, path: str, expected: str, reason: str, notice: str
) -> None:
    environ = {"PATH": ":".join(f"{folder}/{name}/bin" for name in path.split(":"))}
    environ |= {} if virtual is None else {"VIRTUAL_ENV": str(folder / virtual)}
    environ |= {} if conda is None else {"CONDA_PREFIX": f"{folder / conda}/"}
    chosen = choose_python(Root(), environ, own_python(folder / own))
    assert chosen.path == str(folder / expected / "bin/python")
    assert reason in chosen.reason
    assert chosen.notice == "" if not notice else notice in chosen.notice


def own_python(prefix: Path, *, named: bool = False) -> OwnPython:
    return OwnPython(path=str(prefix / "bin/python"), prefix=str(prefix), named=named)


@pytest.mark.parametrize(("own", "expected"), [("own_with", "own_with"), ("own", "with")])
def test_a_python_that_runs_the_module_is_named_and_runs_workers_if_it_has_torch(
    folder: Path, own: str, expected: str
) -> None:
    chosen = choose_python(Root(), {"VIRTUAL_ENV": str(folder / "with")}, own_python(folder / own, named=True))
    assert chosen.path == str(folder / expected / "bin/python")


def test_a_link_to_the_own_environment_is_the_own_environment(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "own")
    chosen = choose_python(Root(), {"VIRTUAL_ENV": str(folder / "link")}, own_python(folder / "own"))
    assert chosen.path == str(folder / "own/bin/python")


def test_an_environment_whose_packages_are_not_found_may_have_torch(folder: Path) -> None:
    (folder / "odd/bin").mkdir(parents=True)
    (folder / "odd/bin/python3").write_text("")
    chosen = choose_python(Root(), {"VIRTUAL_ENV": str(folder / "odd")}, own_python(folder / "own_with"))
    assert chosen.path == str(folder / "odd/bin/python3")


def test_an_environment_whose_python_was_removed_is_ignored(folder: Path) -> None:
    python = folder / "with/bin/python"
    python.unlink()
    python.symlink_to("/no/such/python3.12")
    chosen = choose_python(Root(), {"VIRTUAL_ENV": f"{folder}/with"}, own_python(folder / "own"))
    assert chosen.path == str(folder / "own/bin/python")
    assert chosen.notice == f"not an environment with a Python, and ignored: VIRTUAL_ENV={folder}/with"
    (folder / "with/bin/python3").write_text("")
    chosen = choose_python(Root(), {"VIRTUAL_ENV": f"{folder}/with"}, own_python(folder / "own"))
    assert chosen.path == str(folder / "with/bin/python3")


def test_an_environment_that_others_can_change_has_to_be_in_path(folder: Path) -> None:
    (folder / "with").chmod(0o777)
    own, environ = own_python(folder / "own"), {"VIRTUAL_ENV": f"{folder}/with", "PATH": "/usr/bin"}
    chosen = choose_python(Root(), environ, own)
    assert chosen.path == str(folder / "own/bin/python")
    assert chosen.notice == (
        f"VIRTUAL_ENV={folder}/with is ignored: it is not in PATH, and {folder}/with may be written by everyone; "
        f"--python {folder}/with insists"
    )
    chosen = choose_python(Root(), environ | {"PATH": f"/usr/bin:{folder}/with/bin/"}, own)
    assert (chosen.path, chosen.notice) == (str(folder / "with/bin/python"), "")


CHANGEABLE = ["pyvenv.cfg", "lib", "lib/python3.12", "lib/python3.12/site-packages", "added", "base", "base/lib"]


@pytest.mark.parametrize(
    "part", [*CHANGEABLE, "lib/python3.12/site-packages/torch", "lib/python3.12/site-packages/a.pth"]
)
def test_an_environment_whose_modules_others_can_change_has_to_be_in_path(folder: Path, part: str) -> None:
    """Its Python alone is nothing that they can change."""
    prefix = folder / "with"
    (prefix / "added").mkdir()
    (prefix / "base/lib").mkdir(parents=True)
    (prefix / "lib/python3.12/site-packages/a.pth").write_text(f"import os\n{prefix}/added\n")
    (prefix / "pyvenv.cfg").write_text(f"home = {prefix}/base/bin\nversion = 3.12.1\n")
    own, environ = own_python(folder / "own"), {"VIRTUAL_ENV": str(prefix), "PATH": "/usr/bin"}
    assert choose_python(Root(), environ, own).path == f"{prefix}/bin/python"
    (prefix / part).chmod(0o777)
    chosen = choose_python(Root(), environ, own)
    assert chosen.path == str(folder / "own/bin/python")
    assert f"{prefix / part} may be written by everyone" in chosen.notice
    assert choose_python(Root(), environ | {"PATH": f"{prefix}/bin"}, own).path == f"{prefix}/bin/python"


def test_an_environment_whose_modules_others_can_put_there_has_to_be_in_path(folder: Path) -> None:
    """The standard library of its base is away; what is not there may be harmless."""
    (folder / "shared").mkdir()
    (folder / "shared").chmod(0o1777)
    own, environ = own_python(folder / "own"), {"VIRTUAL_ENV": f"{folder}/with", "PATH": "/usr/bin"}
    for base, chosen in (("safe", "with"), ("shared", "own")):
        (folder / "with/pyvenv.cfg").write_text(f"home = {folder}/{base}/python/bin\nversion = 3.12.1\n")
        found = choose_python(Root(), environ, own)
        assert found.path == f"{folder}/{chosen}/bin/python"
    assert f"{folder}/shared/python is missing; --python" in found.notice


def test_an_environment_that_is_moved_away_while_it_is_checked_has_to_be_in_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is back when its Python is run."""

    def moved(root: Root, python: str, prefix: str) -> list[str]:
        os.rename(folder / "with", folder / "away")
        return [python]

    monkeypatch.setattr(interpreters, "startup_paths", moved)
    own, environ = own_python(folder / "own"), {"VIRTUAL_ENV": f"{folder}/with", "PATH": "/usr/bin"}
    assert choose_python(Root(), environ, own).path == f"{folder}/own/bin/python"


@needs_root
def test_an_environment_with_the_modules_of_another_user_has_to_be_in_path(folder: Path) -> None:
    os.chown(folder / "with/lib", UID, UID)
    own, environ = own_python(folder / "own"), {"VIRTUAL_ENV": f"{folder}/with", "PATH": "/usr/bin"}
    chosen = choose_python(Root(), environ, own)
    assert chosen.path == str(folder / "own/bin/python")
    assert f"{folder}/with/lib belongs to user {UID}; --python {folder}/with insists" in chosen.notice


def test_a_link_to_a_folder_of_path_does_not_make_an_environment_one_of_path(folder: Path) -> None:
    """Python finds pyvenv.cfg, and with it its modules, beside the link."""
    (folder / "other").mkdir()
    (folder / "other/bin").symlink_to(folder / "own/bin")
    (folder / "other").chmod(0o777)
    environ = {"VIRTUAL_ENV": f"{folder}/other", "PATH": f"{folder}/own/bin"}
    chosen = choose_python(Root(), environ, own_python(folder / "own_with"))
    assert chosen.path == str(folder / "own_with/bin/python")
    assert f"VIRTUAL_ENV={folder}/other is ignored: it is not in PATH" in chosen.notice


def test_messages_on_odd_folders_are_one_line() -> None:
    chosen = choose_python(Root(), {"VIRTUAL_ENV": "/no\nerror: 1"}, own_python(Path("/own")))
    assert "\n" not in chosen.notice
    program = Program(kind="script", target="a.py", interpreter="/no\n2/bin/python")
    python = WorkerPython(path=program.interpreter, origin="cli", reason="--python")
    (warning,) = missing_torch(machine(), program, python, {})
    assert warning.startswith(r"/no\n2/bin/python (--python) has no torch: ")


@pytest.mark.parametrize(
    ("version", "torch", "same", "expected"),
    [
        ("3.14", Torch(version="2.13.0", path="/x", plugin=False), False, PLUGIN_FOLDER),
        ("3.12", Torch(version="2.13.0", path="/x", plugin=True), False, PLUGIN_FOLDER),
        ("3.12", Torch(version="2.13.0", path="/x", plugin=True), True, None),
        ("3.10", None, False, PLUGIN_FOLDER),
        ("3.9", Torch(version="2.8.0", path="/x", plugin=False), False, None),
    ],
)
def test_the_plugin_of_a_python_without_this_cpulaunch(
    tmp_path: Path, version: str, torch: Torch | None, same: bool, expected: str | None
) -> None:
    prefix = make_environment(tmp_path / "env", torch=torch is not None, version=version)
    own = own_python(prefix if same else tmp_path)
    host = with_plugin_path(replace(machine(), torch=torch), f"{prefix}/bin/python", own)
    assert host.plugin_path == expected


def test_missing_torch_names_an_environment_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    python = WorkerPython(path="/a/bin/python", origin="default", reason="cpulaunch's own environment")
    (warning,) = missing_torch(machine(), SCRIPT, python, {})
    assert warning.startswith("/a/bin/python (cpulaunch's own environment) has no torch: ")
    assert warning.endswith("name that one with --python")
    make_environment(tmp_path / ".venv", torch=True)
    (warning,) = missing_torch(machine(), SCRIPT, python, {})
    assert warning.endswith(".venv has it: --python .venv")
    for host, program in ((machine(), None), (replace(machine(), torch_known=False), SCRIPT)):
        assert not missing_torch(host, program, python, {})
    assert not missing_torch(machine(), replace(SCRIPT, kind="command"), python, {})


@needs_root
@pytest.mark.parametrize(("owner", "named"), [(0, False), (UID, True)])
def test_an_environment_of_a_stranger_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, named: bool
) -> None:
    """Anyone can put one into /tmp; who owns the current folder decides on all that is in it."""
    monkeypatch.chdir(tmp_path)
    os.chown(make_environment(tmp_path / ".venv", torch=True), UID, UID)
    os.chown(tmp_path, owner, owner)
    tmp_path.chmod(0o1777)
    python = WorkerPython(path="/a/bin/python", origin="default", reason="cpulaunch's own environment")
    (warning,) = missing_torch(machine(), SCRIPT, python, {})
    assert warning.endswith("--python .venv") == named


@needs_root
def test_an_environment_behind_a_link_of_a_stranger_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads elsewhere once it was named."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o1777)
    make_environment(tmp_path / "own", torch=True)
    (tmp_path / ".venv").symlink_to("own")
    assert interpreters._is_near(".venv", {})
    os.chown(tmp_path / ".venv", UID, UID, follow_symlinks=False)
    assert not interpreters._is_near(".venv", {})


@needs_root
def test_users_without_a_number_are_not_the_owner_of_the_current_folder() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))

    def look() -> None:
        os.chdir(folder)
        assert interpreters._is_near("venv", {})
        assert os.stat(".venv").st_uid == os.stat(".").st_uid, "which says nothing here"
        assert not interpreters._is_near(".venv", {})
        os.chdir(folder / "closed")
        assert interpreters._is_near(".venv", {}), "in a folder that others cannot write"

    try:
        for name in ("venv", ".venv", "closed/.venv"):
            make_environment(folder / name, torch=True)
        for each, uid, mode in ((folder, OVERFLOW, 0o1777), (folder / "closed", OVERFLOW, 0o755)):
            os.chown(each, uid, uid)
            each.chmod(mode)
        os.chown(folder / ".venv", UID, UID)
        os.chown(folder / "closed/.venv", OVERFLOW, OVERFLOW)
        in_container(look)
    finally:
        shutil.rmtree(folder)


def test_an_environment_in_the_current_folder_takes_little_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may make any number of folders with links to one large file."""
    for number in range(200):
        (tmp_path / f".venv/lib/python3x{number}/site-packages/torch").mkdir(parents=True)
    (tmp_path / ".venv/bin").mkdir()
    (tmp_path / ".venv/bin/python").touch()
    read: list[int] = []
    text = Root.text

    def counted(root: Root, name: str, *, limit: int = 1 << 24) -> str | None:
        read.append(limit)
        return text(root, name, limit=limit)

    monkeypatch.setattr(Root, "text", counted)
    monkeypatch.chdir(tmp_path)
    assert not interpreters._is_near(".venv", {})
    assert sum(read) < 1 << 24
