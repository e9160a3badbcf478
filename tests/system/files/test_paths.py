"""Whose links are followed, and which folders count as ones that no other user can change."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import cpulaunch
from cpulaunch.launch.process.run_directory import _parents
from cpulaunch.system.files.caches import others_access, read_lines
from cpulaunch.system.files.paths import (
    is_of_current_folder,
    is_trusted,
    locate,
    open_folder,
    without_relative_folders,
)
from cpulaunch.system.files.trust import is_secure, secure_path, untrusted_part
from cpulaunch.system.files.writing import check_output, open_log
from tests.strangers import OVERFLOW, UID, as_stranger, folder_of_stranger, in_container, in_user_namespace, needs_root

strangers = pytest.fixture(folder_of_stranger)


def opened(path, **options):
    """The path of the folder that was opened."""
    fd = open_folder(str(path), **options)
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def located(path):
    place = locate(str(path))
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{place.folder}"), place.name), place.is_proc
    finally:
        os.close(place.folder)


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


def test_links_with_several_names_are_not_followed_where_everyone_may_write(tmp_path):
    """Where hard links are not protected, anyone gives root's links names there."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "link").symlink_to("logs")
    os.link(tmp_path / "link", tmp_path / "other", follow_symlinks=False)
    assert opened(tmp_path / "other") == str(tmp_path / "logs")
    tmp_path.chmod(0o1777)
    for path in (tmp_path / "other", tmp_path / "other/below"):
        with pytest.raises(PermissionError, match="with several names, where everyone may write"):
            open_folder(str(path), make=0o755)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))])
def test_pipes_and_devices_with_several_names_are_not_written_to_where_everyone_may_write(tmp_path, make):
    try:
        make(tmp_path / "one")
    except PermissionError:
        pytest.skip("devices cannot be made here")
    os.link(tmp_path / "one", tmp_path / "report.json")
    check_output(str(tmp_path / "report.json"))
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="with several names, where everyone may write"):
        check_output(str(tmp_path / "report.json"))


@pytest.mark.parametrize(
    ("folder", "mode", "names", "is_meant"),
    [
        (0o1777, 0o755, 1, True),
        (0o1777, 0o755, 2, False),
        (0o1777, 0o666, 1, False),
        (0o755, 0o666, 2, True),
        (0o775, 0o777, 2, True),
    ],
)
def test_a_name_that_anyone_may_have_given_or_written_is_not_meant(
    tmp_path, monkeypatch, folder, mode, names, is_meant
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").write_text("")
    (tmp_path / "python").chmod(mode)
    if names == 2:
        os.link(tmp_path / "python", tmp_path / "other")
    tmp_path.chmod(folder)
    assert is_of_current_folder("python") == is_meant
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv").chmod(0o777)  # As some mounts show all folders.
    assert is_of_current_folder("venv")


@needs_root
def test_links_of_root_are_followed_in_another_users_folder(tmp_path, strangers):
    (strangers / "link").symlink_to(tmp_path)
    assert opened(strangers / "link") == str(tmp_path)


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


def is_refused(path):
    try:
        os.close(locate(str(path)).folder)
    except PermissionError:
        return True
    return False


def check_all(**facts):
    """Effect: names the facts that do not hold, in a child process. Raises: OSError."""
    if wrong := [name for name, holds in facts.items() if not holds]:
        sys.__stderr__.write(f"wrong: {wrong}\n")
        raise OSError


@pytest.fixture
def others(strangers):
    """The folder of a third user, who made links in it."""
    folder = Path(tempfile.mkdtemp(prefix="others-", dir="/tmp"))
    (strangers / "own").write_text("keep")
    for name, target in (("log", strangers / "own"), ("way", strangers)):
        (folder / name).symlink_to(target)
        os.chown(folder / name, UID + 1, UID + 1, follow_symlinks=False)
    (folder / "below").mkdir()
    os.chown(folder, UID + 1, UID + 1)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
@pytest.mark.parametrize("inside", [0, 1000, None])
def test_in_a_user_namespace_others_are_not_taken_for_root(others, strangers, inside):
    """Root's files and theirs show the same owner there, in the last case this user's too."""

    def check():
        check_all(
            alike=os.stat(others).st_uid == os.stat("/").st_uid,
            followed=is_refused(others / "log"),
            secure=not is_secure(str(others)) and not is_secure(str(others / "below")),
            trusted=not is_trusted(os.stat(others)),
            private=others_access(os.open(others, os.O_RDONLY)) is not None,
            library=untrusted_part(str(others)) is not None,
        )

    in_user_namespace(check, inside=inside)


@needs_root
@pytest.mark.parametrize("inside", [0, 1000])
def test_in_a_user_namespace_launches_find_their_folders(strangers, inside):
    def check():
        (strangers / "link").symlink_to("logs")
        (strangers / "logs").mkdir()
        check_all(
            tmp=is_secure("/tmp"),
            own=is_secure(str(strangers / "logs")),
            own_link=opened(strangers / "link/new", make=0o755) == str(strangers / "logs/new"),
            stdout=located("/dev/stdout")[1],
            system_link=not Path("/var/run").is_symlink() or opened("/var/run") == os.path.realpath("/var/run"),
            order=list(_parents({"TMPDIR": str(strangers)}))[:2] == [str(strangers), "/tmp"],
        )

    in_user_namespace(check, inside=inside)


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
    assert path_of(strangers / "own") == str(tmp_path), "not through the link, which its folder's owner can exchange"


MOUNTED = r"""
import os, sys
from pathlib import Path
from cpulaunch.system.files.outputs import REPORT, save_output
mount, user = Path(sys.argv[1]), sys.argv[2]
os.system(f"mount -t tmpfs stick {mount} && mount -t tmpfs run /run")
os.mkdir("/run/mount")
Path("/run/mount/utab").write_text(f"SRC=stick TARGET={mount} ROOT=/ OPTS=user={user}\n")
target = mount.parent / "target"
target.write_text("root's\n")
(mount / "report.json").symlink_to(target)
print(save_output(REPORT, str(mount / "report.json"), "overwritten\n"))
print(target.read_text())
"""


@needs_root
@pytest.mark.parametrize(("user", "content"), [("eve", "root's"), ("root", "overwritten")])
def test_links_in_a_file_system_that_another_user_mounted_are_not_followed(tmp_path, user, content):
    """As fstab permits it. The links on the user's medium may belong to root."""
    (tmp_path / "mount").mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTED, str(tmp_path / "mount"), user]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert content in shown
    assert (f"is in a file system that user {user} mounted" in shown) == (user == "eve")


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


def made_in(folder, uid):
    """Effect: files and links of this user are in a new folder of theirs, and its path."""
    folder.mkdir(mode=0o755)
    (folder / "libx.so").write_bytes(b"library")
    (folder / "cache").write_text("head\nline\n")
    (folder / "link.so").symlink_to("libx.so")
    (folder / "link.json").symlink_to("report.json")
    os.mkfifo(folder / "pipe")
    for each in (folder, *folder.iterdir()):
        os.chown(each, uid, uid, follow_symlinks=False)
    return folder


def seen_in(folder):
    """Which of its contents are used."""
    uses = {
        "library": lambda: untrusted_part(str(folder / "libx.so")) is None,
        "link": lambda: untrusted_part(str(folder / "link.so")) is None,
        "cache": lambda: read_lines(str(folder / "cache"), header="head", max_bytes=100) == ["line"],
        "secure": lambda: is_secure(str(folder)),
        "pipe": lambda: check_output(str(folder / "pipe")),
        "target": lambda: located(folder / "link.json")[0] == str(folder / "report.json"),
    }
    return {name for name, is_used in uses.items() if succeeds(is_used)}


def succeeds(is_used):
    try:
        return is_used()
    except PermissionError:
        return False


@needs_root
def test_users_without_a_number_are_not_the_one_whose_number_their_files_show(strangers):
    own, foreign = made_in(strangers / "own", OVERFLOW), made_in(strangers / "foreign", UID)
    os.chown(strangers, 0, 0)

    def look():
        assert seen_in(own) == {"library", "link", "cache", "secure", "pipe", "target"}
        assert os.stat(foreign).st_uid == os.geteuid(), "which says nothing here"
        assert seen_in(foreign) == set(), "of the stranger's"
        for _ in ("new", "with content"):
            os.close(open_log(str(own / "log")))

    in_container(look)


@needs_root
@pytest.mark.parametrize("use", [open_log, check_output], ids=["log", "report"])
def test_a_file_of_a_user_without_a_number_is_an_error_in_a_folder_that_others_can_write(strangers, use):
    os.chown(strangers, 0, 0)
    strangers.chmod(0o1777)
    for name, uid in {"own": OVERFLOW, "foreign": UID}.items():
        (strangers / name).touch()
        (strangers / name).chmod(0o666)
        os.chown(strangers / name, uid, uid)

    def look():
        use(str(strangers / "own"))
        with pytest.raises(PermissionError):
            use(str(strangers / "foreign"))

    in_container(look)


@needs_root
def test_below_a_private_folder_of_a_user_whose_number_strangers_show_all_is_secure(strangers):
    (strangers / "open").mkdir()
    for each in (strangers, strangers / "open"):
        os.chown(each, OVERFLOW, OVERFLOW)
    (strangers / "open").chmod(0o775)
    strangers.chmod(0o700)

    def look():
        assert is_secure(str(strangers / "open"))

    in_container(look)


def test_of_relative_entries_of_pythonpath_one_that_leads_to_cpulaunch_is_made_absolute(tmp_path, monkeypatch):
    root = os.path.dirname(os.path.dirname(cpulaunch.__file__))
    monkeypatch.chdir(root)
    for path, kept in ((":/one", f"{root}:/one"), ("cpulaunch:./:/one", f"{root}:/one"), ("tests", None), ("", None)):
        environ = without_relative_folders({"PYTHONPATH": path, "A": "1"})
        assert environ == {"A": "1"} | ({} if kept is None else {"PYTHONPATH": kept})
    monkeypatch.chdir(tmp_path)
    assert without_relative_folders({"PYTHONPATH": ":."}) == {}
