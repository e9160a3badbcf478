"""Where a run's directory is made: where no other user can replace it, if there is such a place."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.launch.process import run_directory
from cpulaunch.launch.process.run_directory import (
    _parents,
    choose_private_path,
    make_private_path,
    remove_run_directory,
)
from cpulaunch.records.errors import LaunchError
from cpulaunch.system.files.writing import open_log
from tests.strangers import as_stranger, folder_of_stranger, in_user_namespace, needs_root

strangers = pytest.fixture(folder_of_stranger)


def chosen(folder: Path) -> str:
    return os.path.dirname(choose_private_path({"TMPDIR": str(folder)}))


def test_tmpdir_is_used_also_through_an_own_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert chosen(tmp_path / "real") == chosen(tmp_path / "link") == str(tmp_path / "real")


def test_others_are_not_looked_at_where_tmpdir_takes_files(tmp_path: Path) -> None:
    code = (
        "import sys; from cpulaunch.launch.process.run_directory import choose_private_path; "
        "sys.addaudithook(lambda event, args: event == 'open' and print(args[0])); "
        f"choose_private_path({{'TMPDIR': {str(tmp_path)!r}}})"
    )
    opened = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert tmp_path.name in opened
    assert "shm" not in opened


@needs_root
def test_what_a_link_of_another_user_leads_to_is_not_used(tmp_path: Path, strangers: Path) -> None:
    as_stranger(lambda: (strangers / "link").symlink_to(tmp_path))
    assert chosen(strangers / "link") == "/tmp"


@needs_root
def test_a_folder_that_is_away_while_it_is_checked_is_not_used(strangers: Path) -> None:
    """Its owner moves it, and back before it is used."""
    assert next(_parents({"TMPDIR": str(strangers / "away")})) == "/tmp"
    assert chosen(strangers) == "/tmp"


@needs_root
def test_no_directory_is_made_that_others_can_replace(strangers: Path) -> None:
    """As where the folder became another user's since the plan."""
    with pytest.raises(LaunchError, match="cannot create the files of this run") as caught:
        make_private_path(f"{strangers}/cpulaunch-1")
    assert caught.value.source == "other users can replace it"
    assert list(strangers.iterdir()) == []
    make_private_path("/tmp/cpulaunch-test-of-run-directory")
    os.rmdir("/tmp/cpulaunch-test-of-run-directory")


@needs_root
def test_where_others_have_filled_the_shared_folders_caches_are_used_and_nothing_that_they_can_replace(
    tmp_path: Path, strangers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "TEMPORARY", ("/proc", str(strangers)))
    path = choose_private_path({"XDG_CACHE_HOME": str(tmp_path)})
    assert os.path.dirname(path) == f"{tmp_path}/cpulaunch/run"
    make_private_path(path)
    assert os.stat(path).st_mode & 0o777 == 0o700
    for environ in ({"XDG_CACHE_HOME": f"{strangers}"}, {"XDG_CACHE_HOME": f"{strangers}", "TMPDIR": f"{strangers}"}):
        with pytest.raises(LaunchError):
            make_private_path(choose_private_path(environ))
    assert list(strangers.iterdir()) == []


def test_a_private_current_folder_is_used_where_nothing_else_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is read-only."""
    monkeypatch.setattr(run_directory, "TEMPORARY", ("/proc", "."))
    monkeypatch.chdir(tmp_path)
    path = choose_private_path({"XDG_CACHE_HOME": "/proc"})
    assert os.path.dirname(path) == str(tmp_path)
    make_private_path(path)


@needs_root
def test_where_own_files_show_another_owner_a_directory_and_logs_can_be_made(strangers: Path) -> None:
    """In a user namespace without numbers, and on shares that give files to one owner."""

    def make() -> None:
        path = choose_private_path({})
        make_private_path(path)
        os.rmdir(path)
        os.chmod(strangers, 0o1777)
        folder = os.open(strangers, os.O_RDONLY)
        os.close(open_log("worker-0.log", folder=folder))
        os.unlink(strangers / "worker-0.log")

    in_user_namespace(make, inside=None)


def test_a_folder_that_cannot_be_checked_is_not_secure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert chosen(tmp_path / "missing") == "/tmp"
    monkeypatch.chdir(tmp_path)
    assert chosen(Path("missing")) == "/tmp"


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_share_that_gives_files_to_another_user_is_used_where_nothing_else_can_be(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, own = tmp_path / "share", tmp_path / "own"
    for folder in (share, own):
        folder.mkdir()
        folder.chmod(mode)
    owner = os.geteuid()
    monkeypatch.setattr(run_directory, "_write_probe", lambda parent: owner + (parent == str(share)))
    environ = {"XDG_CACHE_HOME": "/proc", "TMPDIR": str(share)}
    for others, expected in (((str(own),), own), (("/missing",), share)):
        monkeypatch.setattr(run_directory, "TEMPORARY", others)
        assert os.path.dirname(choose_private_path(environ)) == str(expected)


@pytest.mark.parametrize("mode", [0o700, 0o777])
@pytest.mark.parametrize("cause", ["full", "read-only"])
def test_a_cache_that_takes_no_files_is_not_used_before_a_share_that_does(
    cause: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, cache = tmp_path / "share", tmp_path / "cpulaunch/run"
    share.mkdir()
    share.chmod(mode)
    cache.mkdir(parents=True, mode=0o700)

    def probe(parent: str) -> int:
        if parent == str(cache):
            raise OSError(errno.ENOSPC if cause == "full" else errno.EROFS, cause)
        return os.geteuid() + 1

    monkeypatch.setattr(run_directory, "_write_probe", probe)
    monkeypatch.setattr(run_directory, "TEMPORARY", ("/missing", str(share)))
    path = choose_private_path({"XDG_CACHE_HOME": str(tmp_path)})
    make_private_path(path)
    assert os.path.dirname(path) == str(share)
    remove_run_directory(path)


def test_an_own_folder_that_everyone_may_write_is_used_where_nothing_else_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a Kubernetes pod that is read-only but for an emptyDir; not while a safe folder is only full."""
    shared, full = tmp_path / "shared", tmp_path / "full"
    for folder in (shared, full):
        folder.mkdir()
    shared.chmod(0o777)
    environ = {"XDG_CACHE_HOME": "/proc", "TMPDIR": str(shared)}
    monkeypatch.setattr(run_directory, "_owner_of_new", lambda parent: None)
    monkeypatch.setattr(run_directory, "TEMPORARY", (str(full),))
    with pytest.raises(LaunchError):
        make_private_path(choose_private_path(environ))
    monkeypatch.setattr(run_directory, "TEMPORARY", ("/missing",))
    path = choose_private_path(environ)
    make_private_path(path)
    assert os.path.dirname(path) == str(shared)


@pytest.mark.parametrize("kind", ["current folder", "TMPDIR", "/tmp"])
def test_the_only_folder_that_takes_files_is_used_whichever_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.chdir(shared if kind == "current folder" else "/proc")
    monkeypatch.setattr(run_directory, "TEMPORARY", (str(shared) if kind == "/tmp" else "/missing", "."))
    tmpdir = {"TMPDIR": str(shared), "/tmp": "/scratch/gone"}.get(kind, "")
    monkeypatch.setattr(run_directory, "_may_write", lambda parent: parent == str(shared))
    path = choose_private_path({"XDG_CACHE_HOME": "/proc", "TMPDIR": tmpdir})
    make_private_path(path)
    assert os.path.dirname(path) == str(shared)


def test_no_folder_that_everyone_may_write_is_used_while_a_safe_one_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it TMPDIR, or behind a link, as /tmp on macOS."""
    shared, full, link = tmp_path / "shared", tmp_path / "full", tmp_path / "link"
    for folder in (shared, full):
        folder.mkdir()
    shared.chmod(0o777)
    link.symlink_to("full")
    monkeypatch.chdir(shared)
    monkeypatch.setattr(run_directory, "_takes_files", lambda parent: parent == str(shared))
    for temporary, tmpdir in ((("/missing", "."), full), ((str(link), "."), "/missing"), ((str(link),), shared)):
        monkeypatch.setattr(run_directory, "TEMPORARY", temporary)
        with contextlib.suppress(LaunchError):
            make_private_path(choose_private_path({"XDG_CACHE_HOME": "/proc", "TMPDIR": str(tmpdir)}))
    assert list(shared.iterdir()) == []


def test_what_removes_old_files_finds_the_directory_locked(tmp_path: Path) -> None:
    """As systemd-tmpfiles, which takes an exclusive lock on what it removes: tmpfiles.d(5)."""
    make_private_path(str(tmp_path / "run"))
    folder = os.open(tmp_path / "run", os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)


def test_a_removed_directory_takes_no_descriptor(tmp_path: Path) -> None:
    """As that of each launch that `compare` and `tune` make where the file system of the first one is full."""
    before = os.listdir("/dev/fd")
    make_private_path(str(tmp_path / "run"))
    remove_run_directory(str(tmp_path / "run"))
    assert len(os.listdir("/dev/fd")) == len(before)
