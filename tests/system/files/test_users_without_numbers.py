"""Whose files and links are used in user namespaces, where several users show one number."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from reached import located, opened

from cpulaunch.launch.process.run_directory import _parents
from cpulaunch.system.files.caches import others_access, read_lines
from cpulaunch.system.files.owners import is_trusted
from cpulaunch.system.files.paths import locate
from cpulaunch.system.files.trust import is_secure, untrusted_part
from cpulaunch.system.files.writing import check_output, open_log
from tests.strangers import OVERFLOW, UID, folder_of_stranger, in_container, in_user_namespace, needs_root

strangers = pytest.fixture(folder_of_stranger)


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
