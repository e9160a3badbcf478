"""Which folders and files a path leads to, and whose links are followed."""

import os
import stat
import struct
import subprocess
import sys

import pytest
from reached import located, opened

from cpulaunch.system.files import acls
from cpulaunch.system.files.folders import make_secure_folder
from cpulaunch.system.files.paths import is_of_current_folder, locate, open_folder
from cpulaunch.system.files.trust import is_secure, untrusted_folder, untrusted_part
from cpulaunch.system.files.writing import check_output, open_log, write_output
from tests.strangers import UID, as_other_user, as_stranger, folder_of_stranger, needs_root

strangers = pytest.fixture(folder_of_stranger)
ANY = 0xFFFFFFFF
"""The number in entries of an ACL for no named user or group."""


def test_folders_that_others_make_meanwhile_are_opened(tmp_path):
    """As tasks of one Slurm step do, which start at once with the same --log-dir."""
    code = "import os, sys; from cpulaunch.system.files.paths import open_folder as o; sys.stdin.read(1)\n"
    code += f"for i in range(300): os.close(o(f'{tmp_path}/{{i}}/a/b', make=0o777))"
    each = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(3)]
    for process in each:
        process.stdin.close()
    assert [process.wait() for process in each] == [0] * 3


def test_own_links_are_followed(tmp_path, monkeypatch):
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real/up").symlink_to("../link/deep")
    (tmp_path / "absolute").symlink_to(tmp_path / "real/up")
    (tmp_path / "real/file").symlink_to("deep/target")
    monkeypatch.chdir(tmp_path)
    deep = str(tmp_path / "real/deep")
    for path in ("link/deep", "link/up", "absolute", "./absolute/../deep/", "link//up/.", tmp_path / "absolute"):
        assert opened(path) == deep
    assert located("link/file") == located("absolute/target") == (f"{deep}/target", False)


def test_missing_folders_are_made(tmp_path):
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").mkdir()
    assert opened(tmp_path / "link/a/b", make=0o750) == str(tmp_path / "real/a/b")
    assert (tmp_path / "real/a/b").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("path", ["circle/x", "file/x", "missing/x"])
def test_what_is_no_folder_is_an_error_and_leaves_no_descriptor(tmp_path, path):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").touch()
    before = os.listdir("/proc/self/fd")
    for call in (locate, open_folder):
        with pytest.raises(OSError):  # noqa: PT011 - of several kinds
            call(str(tmp_path / path))
    assert os.listdir("/proc/self/fd") == before


def test_links_of_proc_are_left_to_the_kernel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert opened("/proc/self/cwd") == str(tmp_path)
    assert located("/dev/stdout")[1]


@needs_root
def test_links_of_another_user_are_not_followed_by_root(tmp_path, strangers):
    (tmp_path / "folder").mkdir()
    target = str(tmp_path / "folder")
    as_stranger(lambda: os.symlink(target, strangers / "link"))
    for path in (strangers / "link", strangers / "link/below"):
        with pytest.raises(PermissionError, match=f"link is a symbolic link of another user \\(uid {UID}\\)"):
            open_folder(str(path), make=0o777)
        with pytest.raises(PermissionError, match="link is a symbolic link of another user"):
            locate(str(path))
    assert list((tmp_path / "folder").iterdir()) == []


def test_links_with_several_names_are_not_followed_where_others_may_write(tmp_path):
    """Where hard links are not protected, anyone gives root's links names there."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "link").symlink_to("logs")
    os.link(tmp_path / "link", tmp_path / "other", follow_symlinks=False)
    assert opened(tmp_path / "other") == str(tmp_path / "logs")
    tmp_path.chmod(0o1777)
    assert opened(tmp_path / "logs") == str(tmp_path / "logs")
    for path in (tmp_path / "other", tmp_path / "other/below"):
        with pytest.raises(PermissionError, match="with several names, where others may write"):
            open_folder(str(path), make=0o755)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))])
def test_pipes_and_devices_with_several_names_are_not_written_to_where_others_may_write(tmp_path, make):
    try:
        make(tmp_path / "one")
    except PermissionError:
        pytest.skip("devices cannot be made here")
    os.link(tmp_path / "one", tmp_path / "report.json")
    check_output(str(tmp_path / "report.json"))
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="with several names, where others may write"):
        check_output(str(tmp_path / "report.json"))


@needs_root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "reason"),
    [
        (0, 0, 0o755, None),
        (0, 0, 0o2775, None),
        (0, UID, 0o2775, f"may be written by group {UID}"),
        (0, UID, 0o3775, None),
        (0, 0, 0o777, "may be written by everyone"),
        (0, 0, 0o1777, None),
        (UID, UID, 0o755, f"belongs to user {UID}"),
        (UID, 0, 0o1777, f"belongs to user {UID}"),
    ],
)
def test_links_are_followed_where_others_can_give_them_no_other_name(tmp_path, strangers, owner, group, mode, reason):
    """They would give root's link to any file the name of a report."""
    (strangers / "link").symlink_to(tmp_path)
    os.chown(strangers, owner, group)
    strangers.chmod(mode)
    if reason is None:
        assert (opened(strangers / "link"), located(strangers / "link")[0]) == (str(tmp_path), str(tmp_path))
    else:
        for call in (locate, open_folder):
            with pytest.raises(PermissionError, match=f"link is a symbolic link that others can rename: .* {reason}"):
                call(str(strangers / "link"))


@needs_root
def test_a_link_is_not_followed_by_the_name_that_a_member_of_the_group_gave_it(tmp_path, strangers):
    os.chown(strangers, 0, UID)
    strangers.chmod(0o2775)
    (strangers / "keep.txt").symlink_to(tmp_path / "keep.txt")
    (tmp_path / "keep.txt").write_text("keep")
    as_stranger(lambda: os.rename(strangers / "keep.txt", strangers / "report.json"))
    for write in (write_output, lambda path, _: os.close(open_log(path))):
        with pytest.raises(OSError, match="that others can rename"):
            write(str(strangers / "report.json"), b"overwritten")
    assert (tmp_path / "keep.txt").read_text() == "keep"


@needs_root
def test_own_links_are_followed_where_a_umask_lets_a_private_group_write(strangers):
    strangers.chmod(0o775)

    def follow():
        os.mkdir(strangers / "real")
        os.symlink("real", strangers / "link")
        assert located(strangers / "link/file")[0] == located(strangers / "real/file")[0]
        assert located(strangers / "link")[0] == str(strangers / "real")

    as_stranger(follow)


@needs_root
def test_own_links_are_followed_in_a_closed_home_whatever_group_may_write(tmp_path, strangers):
    os.chown(strangers, 0, UID)
    strangers.chmod(0o700)
    (strangers / "project").mkdir()
    os.chown(strangers / "project", 0, UID)
    (strangers / "project").chmod(0o2775)
    (strangers / "project/link").symlink_to(tmp_path)
    assert located(strangers / "project/link")[0] == str(tmp_path)


@needs_root
@pytest.mark.parametrize("group", [UID, UID + 1])
def test_own_links_to_folders_are_followed_where_the_users_own_group_can_write_in_a_folder_of_root(strangers, group):
    """As volumes of Kubernetes are, with the same number for `runAsUser` and `fsGroup`."""
    os.chown(strangers, 0, group)
    strangers.chmod(0o2777)
    as_stranger(lambda: (os.mkdir(strangers / "real"), (strangers / "link").symlink_to("real")))
    strangers.chmod(0o2775)
    assert as_other_user(lambda: write_output(str(strangers / "link/report.json"), b"x")) == (group == UID)
    assert as_other_user(lambda: os.close(open_folder(str(strangers / "link")))) == (group == UID)


@needs_root
def test_no_link_to_a_file_is_followed_where_a_container_of_the_same_pod_can_rename_it(strangers):
    """Kubernetes has all containers of a pod in `fsGroup`, those of another user too."""
    os.chown(strangers, 0, UID)
    strangers.chmod(0o2775)
    (strangers / "keys").symlink_to("private")
    (strangers / "private").write_text("keep")
    for name in ("keys", "private"):
        os.chown(strangers / name, UID, UID, follow_symlinks=False)
    os.rename(strangers / "keys", strangers / "report.json")
    assert not as_other_user(lambda: write_output(str(strangers / "report.json"), b"overwritten"))
    assert not as_other_user(lambda: os.close(open_log(str(strangers / "report.json"))))
    assert (strangers / "private").read_text() == "keep"


@needs_root
def test_what_a_container_of_the_same_pod_can_change_is_not_loaded_or_run_by_its_name(strangers):
    os.chown(strangers, 0, UID)
    strangers.chmod(0o2775)
    (strangers / "python").touch()
    said = f"{strangers} may be written by group {UID}"

    def check():
        os.chdir(strangers)
        found = (untrusted_part(f"{strangers}/python"), untrusted_folder(str(strangers)))
        if found != (said, said) or is_of_current_folder("python") or not is_secure(str(strangers)):
            raise OSError(str(found))
        with pytest.raises(PermissionError, match=said):
            make_secure_folder(f"{strangers}/new")

    as_stranger(check)


def exchanged(strangers, way):
    """Effect: the other user, who owns the folders above root's, puts this in place of one of them."""
    as_stranger(lambda: (os.rename(strangers / "x", strangers / "y"), way()))


@needs_root
@pytest.mark.parametrize("moment", ["undisturbed", "its path is read", "its ACL is read"])
def test_who_can_rename_a_link_is_found_whatever_is_at_the_path_of_its_folder_meanwhile(
    tmp_path, strangers, monkeypatch, moment
):
    folder, closed = strangers / "x/shared", tmp_path / "closed"
    folder.mkdir(parents=True)
    closed.mkdir(mode=0o700)
    (folder / "logs").symlink_to(tmp_path)
    os.chown(strangers / "x", UID, UID)
    os.chown(folder, 0, 0 if moment == "its ACL is read" else UID + 1)
    folder.chmod(0o770)
    if moment == "its ACL is read":
        rows = [(1, 7, ANY), (2, 7, UID), (4, 5, ANY), (16, 7, ANY), (32, 5, ANY)]
        os.setxattr(folder, acls.ACL, struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows))
    read_link, read = os.readlink, acls.read_acl

    def readlink(path, **options):
        found = read_link(path, **options)
        if str(path).startswith("/proc/self/fd/") and (strangers / "x").exists() and moment == "its path is read":
            way = os.path.relpath(strangers / "y", closed)
            exchanged(strangers, lambda: os.symlink(f"{closed}/{way}", strangers / "x"))
        return found

    def read_acl(path):
        if moment == "its ACL is read":
            exchanged(strangers, lambda: os.makedirs(folder))
        return read(path)

    monkeypatch.setattr(os, "readlink", readlink)
    monkeypatch.setattr(acls, "read_acl", read_acl)
    with pytest.raises(PermissionError, match="that others can rename"):
        open_folder(str(folder / "logs"))


@needs_root
def test_the_links_to_folders_that_an_administrator_made_are_followed_by_users(strangers):
    """One who is not root made /data/home, in a folder that only the administrator writes."""
    os.chown(strangers, UID + 1, UID + 1)
    (strangers / "real").mkdir()
    (strangers / "home").symlink_to("real")
    os.chown(strangers / "home", UID + 1, UID + 1, follow_symlinks=False)
    as_stranger(lambda: os.close(open_folder(str(strangers / "home"))))
    with pytest.raises(AssertionError):
        as_stranger(lambda: os.close(locate(str(strangers / "home")).folder))
    strangers.chmod(0o777)
    with pytest.raises(AssertionError):
        as_stranger(lambda: os.close(open_folder(str(strangers / "home"))))


MOUNTED = r"""
import os, sys
from pathlib import Path
from cpulaunch.system.files.outputs import REPORT, save_output
from cpulaunch.system.files.trust import renamer
mount, user, folder = Path(sys.argv[1]), *sys.argv[2:]
os.system(f"mount -t tmpfs stick {mount} && mount -t tmpfs run /run")
os.mkdir("/run/mount")
Path("/run/mount/utab").write_text(f"SRC=stick TARGET={mount} ROOT=/ OPTS=user={user}\n")
target = mount.parent / "target"
target.write_text("root's\n")
(mount / folder).mkdir(exist_ok=True)
(mount / folder / "report.json").symlink_to(target)
print(renamer(os.open(mount / folder, os.O_PATH)))
print(save_output(REPORT, str(mount / folder / "report.json"), "overwritten\n"))
print(target.read_text())
"""


@needs_root
@pytest.mark.parametrize("folder", [".", "below"])
@pytest.mark.parametrize(("user", "content"), [("eve", "root's"), ("root", "overwritten")])
def test_links_in_a_file_system_that_another_user_mounted_are_not_followed(tmp_path, user, content, folder):
    """As fstab permits it. The links on the user's medium may belong to root."""
    (tmp_path / "mount").mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTED, str(tmp_path / "mount"), user, folder]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert content in shown
    assert shown.count(f"is in a file system that user {user} mounted") == (2 if user == "eve" else 0)


COVERED = """
import os, subprocess
from cpulaunch.system.files.paths import open_folder
os.mkdir("real", 0o700)
os.symlink("real", "link")
subprocess.run(["mount", "-t", "tmpfs", "over", os.getcwd()], check=True)  # In a mount namespace of its own.
for mode in (0o755, 0o777):
    os.chmod(".", mode)
    try:
        os.close(open_folder("link"))
        print("followed")
    except PermissionError as error:
        print(error.strerror)
"""


@needs_root
def test_own_links_are_followed_in_a_current_folder_over_which_something_is_mounted(tmp_path):
    """Its path leads to what is mounted there since."""
    command = ["unshare", "--mount", sys.executable, "-c", COVERED]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[0] == "followed"
    assert "may be written by everyone" in shown[1]
