"""Caches are kept below the user's own links, and never below another user's."""

import os

import pytest

from cpulaunch.system.files.caches import open_cache_folder, open_lock_beside, open_lock_file, read_lines, replace_cache
from tests.strangers import UID, as_stranger, folder_of_stranger, needs_root

strangers = pytest.fixture(folder_of_stranger)


def test_a_cache_is_written_below_an_own_link_in_new_private_folders(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / ".cache").symlink_to("real")
    path = str(tmp_path / ".cache/cpulaunch/trials")
    replace_cache(path, ["one", "two"], header="h")
    assert read_lines(path, header="h", max_bytes=99) == ["one", "two"]
    assert (tmp_path / "real/cpulaunch").stat().st_mode & 0o777 == 0o700
    assert [each.name for each in (tmp_path / "real/cpulaunch").iterdir()] == ["trials"]


@needs_root
def test_root_with_another_users_home_writes_nowhere_else(tmp_path, strangers):
    """As sudo keeps HOME on some systems."""
    target = str(tmp_path)
    as_stranger(lambda: os.symlink(target, strangers / ".cache"))
    replace_cache(str(strangers / ".cache/trials"), ["x"], header="h")
    with pytest.raises(PermissionError):
        open_cache_folder(str(strangers / ".cache/graphs"))
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_a_lock_file_of_another_user_is_refused(strangers):
    as_stranger(lambda: os.mkfifo(strangers / "claims"))
    folder = os.open(strangers, os.O_RDONLY)
    with pytest.raises(PermissionError):
        open_lock_file("claims", folder=folder)
    os.close(folder)


@needs_root
@pytest.mark.parametrize(("mode", "user"), [(0o666, "stranger"), (0o600, "stranger"), (0o600, "own")])
def test_a_lock_beside_a_folder_is_refused_if_another_user_made_it(strangers, mode, user):
    """As others may in a sticky folder: that user could hold the lock for ever."""
    strangers.chmod(0o1777)
    os.chown(strangers, 0, 0)
    lock = strangers / "study.lock"
    lock.touch()
    lock.chmod(mode)
    if user == "own":
        os.close(open_lock_beside(str(strangers / "study")))
        return
    os.chown(lock, UID, UID)
    with pytest.raises(PermissionError, match=rf"study\.lock beside it is a file of another user \(uid {UID}\)"):
        open_lock_beside(str(strangers / "study"))


def test_a_lock_beside_a_folder_is_made_and_found_again(tmp_path):
    for _ in range(2):
        os.close(open_lock_beside(str(tmp_path / "study")))
    assert (tmp_path / "study.lock").stat().st_mode & 0o777 == 0o600


def test_a_folder_is_not_opened_through_a_link_in_its_own_place(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "graphs").symlink_to("real")
    with pytest.raises(OSError):  # noqa: PT011 - ELOOP or ENOTDIR
        open_cache_folder(str(tmp_path / "graphs"))
