"""Private folders are removed whole, and nothing else is, whatever another user puts in their place."""

import fcntl
import os
import struct
import subprocess
import sys
import tracemalloc

import pytest

from cpulaunch.launch.process.run_directory import make_unique_directory
from cpulaunch.system.files import folders
from cpulaunch.system.files.folders import (
    GET_FLAGS,
    SET_FLAGS,
    close_to_others,
    make_folder,
    open_own,
    path_exists,
    remove_folder,
    remove_path,
)
from tests.strangers import OVERFLOW, UID, as_stranger, folder_of_stranger, in_container, needs_root
from tests.unanswered import beside_unanswered

strangers = pytest.fixture(folder_of_stranger)


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "victim/deep").mkdir(parents=True)
    (tmp_path / "victim/deep/keep").touch()
    return tmp_path / "victim"


def unharmed(victim):
    return (victim / "deep/keep").exists()


def test_a_folder_is_removed_with_all_that_is_in_it(tmp_path, victim):
    os.close(make_folder(str(tmp_path / "run")))
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    (tmp_path / "run/a/b/c").mkdir(parents=True)
    (tmp_path / "run/a/file").touch()
    (tmp_path / "run/a/b/link").symlink_to(victim)
    (tmp_path / "run/link").symlink_to(victim)
    os.mkfifo(tmp_path / "run/a/b/c/pipe")
    remove_path(str(tmp_path / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert unharmed(victim)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="takes long on a disk")
def test_many_names_take_no_more_memory_than_some(monkeypatch):
    monkeypatch.setattr(folders, "NAMES_AT_ONCE", 100)
    run = make_unique_directory("/dev/shm", "cpulaunch-test-")
    open(f"{run}/0", "w").close()
    for number in range(1, 10_000):
        os.link(f"{run}/0", f"{run}/{number:0200}")
    for number in range(200):
        os.makedirs(f"{run}/folder{number}/deep")
    tracemalloc.start()
    try:
        remove_path(run)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert not os.path.exists(run)


def remove_without_permissions(folder):
    os.close(make_folder(str(folder / "run")))
    (folder / "run/closed/deep/deeper").mkdir(parents=True)
    (folder / "run/closed/deep/file").touch()
    for name in ("run/closed/deep/deeper", "run/closed/deep", "run/closed", "run"):
        (folder / name).chmod(0)
    remove_path(str(folder / "run"))


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="Linux only")
@pytest.mark.skipif(os.geteuid() == 0, reason="root needs no permissions")
def test_folders_without_permissions_are_removed(tmp_path):
    remove_without_permissions(tmp_path)
    assert list(tmp_path.iterdir()) == []


def locked(path):
    """Whether root can lock this file or folder, so that it can be neither changed nor removed. Effect: locks it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        flags = fcntl.ioctl(fd, GET_FLAGS, bytes(8))
        fcntl.ioctl(fd, SET_FLAGS, bytes([flags[0] | 0x10]) + flags[1:])
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@needs_root
@pytest.mark.skipif(sys.byteorder == "big", reason="the flags are in the first byte")
def test_locked_files_and_folders_are_removed(tmp_path):
    os.close(make_folder(str(tmp_path / "run")))
    (tmp_path / "run/closed/deep").mkdir(parents=True)
    (tmp_path / "run/closed/deep/file").touch()
    for name in ("run/closed/deep/file", "run/closed/deep", "run/closed", "run"):
        if not locked(tmp_path / name):
            pytest.skip("this file system locks nothing")
    remove_path(str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_a_locked_file_with_another_name_stays(tmp_path):
    os.close(make_folder(str(tmp_path / "run")))
    (tmp_path / "elsewhere").touch()
    os.link(tmp_path / "elsewhere", tmp_path / "run/file")
    if not locked(tmp_path / "elsewhere"):
        pytest.skip("this file system locks nothing")
    remove_path(str(tmp_path / "run"))
    stayed = (tmp_path / "run/file").exists()
    fd = os.open(tmp_path / "elsewhere", os.O_RDONLY)
    fcntl.ioctl(fd, SET_FLAGS, bytes(8))
    os.close(fd)
    assert stayed


@needs_root
def test_folders_without_permissions_of_an_ordinary_user_are_removed(strangers):
    as_stranger(lambda: remove_without_permissions(strangers))
    assert list(strangers.iterdir()) == []


@needs_root
def test_permissions_of_another_users_folder_are_left(strangers):
    as_stranger(lambda: os.mkdir(strangers / "run", 0o500))
    remove_path(str(strangers / "run"))
    assert (strangers / "run").stat().st_mode & 0o777 == 0o500


def test_a_folder_deeper_than_any_path_is_removed(tmp_path):
    """A worker may make one. A function that calls itself would fail, and so would one that keeps descriptors."""
    fd = make_folder(str(tmp_path / "run"))
    for _ in range(3000):
        os.mkdir("deeper", dir_fd=fd)
        below = os.open("deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    remove_path(str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path, victim):
    (tmp_path / "run").symlink_to(victim)
    remove_path(str(tmp_path / "run"))
    assert unharmed(victim)
    assert not (tmp_path / "run").is_symlink()


@pytest.mark.parametrize("make", [lambda path: path.touch(), os.mkfifo], ids=["file", "pipe"])
def test_what_is_no_folder_is_removed_in_its_place(tmp_path, make):
    make(tmp_path / "run")
    remove_path(str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@needs_root
def test_a_link_of_another_user_in_place_of_the_folder_stays(strangers, victim):
    as_stranger(lambda: os.symlink(victim, strangers / "run"))
    remove_path(str(strangers / "run"))
    assert (strangers / "run").is_symlink()


def test_empty_folders_are_not_entered(tmp_path, monkeypatch):
    """A worker may make thousands, which would delay the end of a launch by seconds."""
    for number in range(3):
        (tmp_path / f"run/{number}").mkdir(parents=True)
    opened = []
    real = os.open

    def noting(name, *rest, **named):
        opened.append(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(os, "open", noting)
    remove_path(str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert not {"0", "1", "2"} & set(opened)


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="Linux only")
def test_a_folder_in_which_others_are_made_without_end_is_left(tmp_path, monkeypatch):
    """As another process of this user can make them, and does while this one looks at what it has found."""
    (tmp_path / "run/first/below").mkdir(parents=True)
    made = []

    def moving(name, folder, deadline, move=folders._move_up):
        made.append(name)
        assert len(made) < 5_000, "no end"
        os.makedirs(f"/proc/self/fd/{folder}/new-{len(made)}/below")
        move(name, folder, deadline)

    monkeypatch.setattr(folders, "REMOVAL_SECONDS", 0.01)
    monkeypatch.setattr(folders, "_move_up", moving)
    remove_path(str(tmp_path / "run"))
    assert path_exists(str(tmp_path / "run"))


def test_what_is_missing_does_not_exist(tmp_path, victim):
    assert path_exists(str(victim))
    (tmp_path / "file").touch()
    for name in ("missing", "missing/run", "file/run"):
        assert not path_exists(str(tmp_path / name))


WITHOUT_DESCRIPTORS = """
import resource, sys
from cpulaunch.system.files.folders import path_exists
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
sys.stdout.write(f"{path_exists(sys.argv[1])} {path_exists(sys.argv[1] + '/missing')}")
"""


def test_without_a_free_descriptor_it_is_told_what_exists(tmp_path):
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True False"


def mount(source, target):
    target.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "--bind", source, target], check=False, capture_output=True).returncode:
        pytest.skip("no mounts here")


@needs_root
@pytest.mark.parametrize("place", ["run", "run/mounted", "run/a/b/mounted"])
def test_what_is_mounted_is_not_entered(tmp_path, victim, place):
    mount(victim, tmp_path / place)
    try:
        (tmp_path / "run/file").touch()
        remove_path(str(tmp_path / "run"))
        assert unharmed(victim)
    finally:
        mounted = tmp_path / place if place != "run/a/b/mounted" else next((tmp_path / "run").rglob("mounted"))
        subprocess.run(["umount", mounted], check=True)
    remove_path(str(tmp_path / "run"))
    assert unharmed(victim)
    assert not (tmp_path / "run").exists()


@needs_root
@pytest.mark.parametrize("make", [os.mkdir, lambda path: path.touch()], ids=["folder", "file"])
def test_a_mount_that_never_answers_holds_nothing_up(tmp_path, make):
    make(tmp_path / "run")
    path = str(tmp_path / "run")
    code = f"""
from cpulaunch.system.files.folders import path_exists, remove_path
remove_path({path!r})
print(path_exists({path!r}))
"""
    said = beside_unanswered(path, code)
    if said is None:
        pytest.skip("no FUSE here")
    assert said == "True\n"
    assert (tmp_path / "run").exists()


@needs_root
def test_a_mount_over_a_locked_file_holds_nothing_up(tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run/file"
    path.touch()
    if subprocess.run(["chattr", "+i", path], check=False, capture_output=True).returncode:
        pytest.skip("this file system locks no files")
    code = f"from cpulaunch.system.files.folders import remove_path; remove_path({str(path.parent)!r}); print('done')"
    try:
        said = beside_unanswered(path, code)
    finally:
        subprocess.run(["chattr", "-i", path], check=False, capture_output=True)
    if said is None:
        pytest.skip("no FUSE here")
    assert said == "done\n"


@needs_root
def test_a_folder_of_another_user_is_not_removed(strangers):
    as_stranger(lambda: os.mkdir(strangers / "run"))
    (strangers / "run/keep").touch()
    remove_path(str(strangers / "run"))
    assert (strangers / "run/keep").exists()
    with pytest.raises(PermissionError, match="replaced by a folder of another user"):
        open_own(str(strangers / "run"))


@needs_root
def test_what_a_descriptor_refers_to_is_removed_after_a_swap(strangers, victim):
    fd = make_folder(str(strangers / "run"))
    os.close(make_folder("attempt", folder=fd))

    def swap():
        os.rename(strangers / "run", strangers / "moved")
        os.mkdir(strangers / "run", 0o755)
        os.symlink(victim, strangers / "run/attempt")

    as_stranger(swap)
    remove_folder("attempt", folder=fd)
    os.close(fd)
    assert unharmed(victim)
    assert list((strangers / "moved").iterdir()) == []


@needs_root
@pytest.mark.parametrize(
    ("mode", "content", "error"),
    [(0o700, ["keep"], "not empty"), (0o770, [], "other users may use")],
    ids=["with what would be removed as that of the new one", "into which others would put what is then taken for own"],
)
def test_an_older_own_folder_in_place_of_a_new_one_is_refused(strangers, monkeypatch, mode, content, error):
    (strangers / "older").mkdir()
    (strangers / "older").chmod(mode)
    for name in content:
        (strangers / "older" / name).touch()
    mkdir = os.mkdir

    def swapping(name, *arguments, **options):
        mkdir(name, *arguments, **options)
        as_stranger(lambda: (os.rename(strangers / "run", strangers / "new"), os.rename(strangers / "older", name)))

    monkeypatch.setattr(os, "mkdir", swapping)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=error):
        make_folder(str(strangers / "run"))
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(strangers / "run") == content


def test_a_folder_on_a_share_that_keeps_no_modes_is_new(tmp_path, monkeypatch):
    """As on CIFS or FAT, where all folders and files show the modes that the mount names."""
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((fstat(fd).st_mode | 0o055, *fstat(fd)[1:])))
    os.close(make_folder(str(tmp_path / "run")))
    assert os.listdir(tmp_path / "run") == []


def test_a_folder_is_new_whatever_its_parent_hands_on(tmp_path):
    """A group, and permissions of a friend."""
    entries = (1, 7, -1), (2, 7, UID), (4, 7, -1), (16, 7, -1), (32, 7, -1)
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in entries)
    tmp_path.chmod(0o2777)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", acl)
    except (OSError, AttributeError):
        pytest.skip("this file system has no ACLs")
    os.close(make_folder(str(tmp_path / "run")))
    assert os.getxattr(tmp_path / "run", "system.posix_acl_access")
    assert (tmp_path / "run").stat().st_mode & 0o7777 == 0o2700


def test_a_folder_on_a_share_that_maps_users_is_own(tmp_path, monkeypatch):
    """There, what this user makes belongs to another number, as if this process had another one."""
    monkeypatch.setattr(os, "geteuid", lambda: 77_777)
    os.close(make_folder(str(tmp_path / "run")))
    (tmp_path / "run/file").touch()
    remove_path(str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_no_error(tmp_path):
    remove_path(str(tmp_path / "missing/run"))


@needs_root
def test_a_folder_of_a_user_without_a_number_is_not_an_own_one(strangers):
    """It shows the number of user 65534 in a container, and so does a file that this user makes in it."""
    for name, uid in {"own": OVERFLOW, "foreign": UID}.items():
        (strangers / name).mkdir()
        (strangers / name / "keep").touch()
        (strangers / name).chmod(0o777)
        for each in (strangers / name / "keep", strangers / name):
            os.chown(each, uid, uid)
    os.chown(strangers, OVERFLOW, OVERFLOW)

    def use():
        os.close(open_own(str(strangers / "own")))
        with pytest.raises(PermissionError):
            open_own(str(strangers / "foreign"))
        for name in ("own", "foreign"):
            remove_path(str(strangers / name))

    in_container(use)
    assert [each.name for each in strangers.glob("*/*")] == ["keep"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has folders with fixed modes")
def test_a_folder_is_closed_to_others_where_its_mode_can_be_changed(tmp_path):
    for path, mode, closed in ((tmp_path, 0o755, True), (tmp_path, 0o700, True), ("/proc/self", None, False)):
        fd = os.open(path, os.O_RDONLY)
        if mode is not None:
            os.fchmod(fd, mode)
        assert close_to_others(fd) == closed
        assert (os.fstat(fd).st_mode & 0o77 == 0) == closed
        os.close(fd)
