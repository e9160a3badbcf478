"""Which folders count as ones that no other user can change."""

import os
import subprocess
import sys

import pytest

from cpulaunch.system.files.paths import open_folder
from cpulaunch.system.files.trust import is_secure, secure_path
from tests.strangers import UID, as_stranger, folder_of_stranger, needs_root

strangers = pytest.fixture(folder_of_stranger)


@needs_root
def test_folders_that_others_can_change_are_not_secure(tmp_path, strangers):
    (strangers / "below").mkdir()
    assert not is_secure(str(strangers))
    assert not is_secure(str(strangers / "below"))
    assert is_secure("/tmp")
    os.chown(strangers, 0, 0)
    cases = ((0, 0o755, True), (0, 0o775, True), (UID, 0o775, False), (UID, 0o1777, True), (0, 0o777, False))
    for group, mode, secure in (*cases, (0, 0o700, True)):
        os.chown(strangers, 0, group)
        strangers.chmod(mode)
        assert is_secure(str(strangers / "below")) is secure


@needs_root
def test_below_a_closed_folder_only_what_its_group_may_write_is_secure(strangers):
    """Other users reach it where it is mounted elsewhere, as a container's volume is, or if they were in it before."""
    os.chown(strangers, 0, 0)
    strangers.chmod(0o700)
    (strangers / "below").mkdir()
    for owner, mode, secure in ((0, 0o775, True), (0, 0o1777, True), (0, 0o777, False), (UID, 0o755, False)):
        os.chown(strangers / "below", owner, UID)
        (strangers / "below").chmod(mode)
        assert is_secure(str(strangers / "below")) is secure


def path_of(path):
    fd = open_folder(str(path))
    try:
        return secure_path(str(path), fd)
    finally:
        os.close(fd)


def test_the_path_of_a_secure_folder_has_no_links(tmp_path, monkeypatch):
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert path_of("link/deep") == path_of(tmp_path / "link/deep") == str(tmp_path / "real/deep")


@needs_root
def test_a_folder_that_was_exchanged_since_it_was_opened_has_no_secure_path(tmp_path, strangers):
    (strangers / "logs").mkdir()
    fd = open_folder(str(strangers / "logs"))
    assert secure_path(str(strangers / "logs"), fd) is None
    as_stranger(lambda: (os.rename(strangers / "logs", strangers / "moved"), os.symlink("/root", strangers / "logs")))
    assert secure_path(str(strangers / "logs"), fd) is None
    os.unlink(strangers / "logs")
    assert secure_path(str(strangers / "logs"), fd) is None
    os.close(fd)
    (strangers / "own").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="own is a symbolic link that others can rename"):
        path_of(strangers / "own")
    os.chown(strangers, 0, 0)
    assert path_of(strangers / "own") == str(tmp_path)


SECURE = r"""
import os, sys
from pathlib import Path
from cpulaunch.launch.process.run_directory import _parents
from cpulaunch.system.files.trust import is_secure
mount, user = Path(sys.argv[1]), sys.argv[2]
os.system(f"mount -t tmpfs stick {mount} && mount -t tmpfs run /run")
mount.chmod(0o755)
os.mkdir("/run/mount")
Path("/run/mount/utab").write_text(f"SRC=stick TARGET={mount} ROOT=/ OPTS=user={user}\n")
(mount / "below").mkdir()
parent = next(_parents({"TMPDIR": str(mount)}))
print(is_secure(str(mount)), is_secure(str(mount / "below")), parent == str(mount))
"""


@needs_root
@pytest.mark.parametrize(("user", "secure"), [("eve", "False False False"), ("root", "True True True")])
def test_a_file_system_that_another_user_mounted_is_not_secure(strangers, user, secure):
    os.chown(strangers, 0, 0)
    (strangers / "mount").mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", SECURE, str(strangers / "mount"), user]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == secure
