"""Files are written where their names say, never through what another user put there."""

import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from contextlib import suppress

import pytest

from cpulaunch.system.files import writing
from tests.strangers import UID, as_stranger, folder_of_stranger, needs_root

strangers = pytest.fixture(folder_of_stranger)


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("keep")
    return path


def descriptor(path):
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize(
    "write",
    [writing.create, writing.claim_name, lambda path: writing.create_with(path, b"x")],
    ids=["create", "claim", "create_with"],
)
@pytest.mark.parametrize("target", ["victim", "missing"])
def test_a_new_file_is_not_made_through_a_link(tmp_path, victim, write, target):
    (tmp_path / "link").symlink_to(target)
    with suppress(FileExistsError):
        assert not write(str(tmp_path / "link"))
    assert victim.read_text() == "keep"
    assert not (tmp_path / "missing").exists()


def test_new_files_are_private(tmp_path):
    os.close(writing.create(str(tmp_path / "new")))
    writing.replace(str(tmp_path / "replaced"), b"x")
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "replaced")} == {0o600}


def test_a_link_is_replaced_and_not_followed(tmp_path, victim):
    (tmp_path / "link").symlink_to("victim")
    writing.replace(str(tmp_path / "link"), b"new")
    assert (victim.read_text(), (tmp_path / "link").read_text()) == ("keep", "new")


def test_a_replacement_that_fails_leaves_no_other_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):  # noqa: PT011 - EISDIR or EEXIST
        writing.replace(str(tmp_path / "folder"), b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_events_are_added_to_regular_files_alone(tmp_path, victim):
    writing.append(str(victim), b"+")
    (tmp_path / "link").symlink_to("victim")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "missing"):
        with pytest.raises(OSError):  # noqa: PT011 - of several kinds
            writing.append(str(tmp_path / name), b"x")
    assert victim.read_text() == "keep+"


def test_a_file_of_lines_stops_growing(victim, monkeypatch):
    monkeypatch.setattr(writing, "MAX_LINES_FILE", 6)
    for _ in range(9):
        writing.append(str(victim), b"+")
    assert victim.read_text() == "keep++"


def test_an_unnamed_file_holds_data_and_leaves_nothing(tmp_path):
    fd = writing.create_unnamed(str(tmp_path))
    assert os.write(fd, b"data") == os.fstat(fd).st_size == 4
    os.close(fd)
    assert list(tmp_path.iterdir()) == []


def test_where_files_cannot_be_unnamed_they_lose_their_name(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    test_an_unnamed_file_holds_data_and_leaves_nothing(tmp_path)


def test_a_pipe_that_is_another_file_is_refused(tmp_path, victim):
    for flags in (os.O_RDONLY, os.O_WRONLY):
        with pytest.raises(OSError, match="not a named pipe"):
            writing.open_pipe(str(victim), flags)


LOGS = {
    "new": lambda folder, victim: None,
    "an earlier run's": lambda folder, victim: (folder / "log").write_text("before"),
    "an own link": lambda folder, victim: (folder / "log").symlink_to(victim),
    "a link to a device": lambda folder, victim: (folder / "log").symlink_to("/dev/null"),
}


@pytest.mark.parametrize("make", LOGS.values(), ids=LOGS)
def test_logs_of_the_user_are_opened(tmp_path, victim, make):
    (tmp_path / "logs").mkdir()
    make(tmp_path / "logs", victim)
    folder = descriptor(tmp_path / "logs")
    fd = writing.open_log("log", folder=folder)
    assert os.write(fd, b"line") == 4
    os.close(fd)
    os.close(folder)
    assert (tmp_path / "logs/log").read_bytes() in (b"line", b"beforeline", b"keepline", b"")


@needs_root
def test_a_log_that_another_user_put_there_is_refused(strangers, victim):
    def plant():
        os.symlink(victim, strangers / "link")
        os.symlink(victim.parent / "missing", strangers / "dangling")
        os.mkfifo(strangers / "pipe", 0o666)

    as_stranger(plant)
    reader = os.open(strangers / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.link(victim, strangers / "hard") if victim.stat().st_dev == strangers.stat().st_dev else None
    folder = descriptor(strangers)
    for name in os.listdir(strangers):
        with pytest.raises(PermissionError):
            writing.open_log(name, folder=folder)
        if name != "hard":
            with pytest.raises(PermissionError):
                writing.write_output(str(strangers / name), b"x")
    os.close(folder)
    os.close(reader)
    assert victim.read_text() == "keep"
    assert not (victim.parent / "missing").exists()


@needs_root
def test_root_still_writes_in_another_users_folder(strangers):
    as_stranger(lambda: (strangers / "log").write_text("of an earlier run of theirs"))
    folder = descriptor(strangers)
    for name in ("log", "new"):
        os.close(writing.open_log(name, folder=folder))
    os.close(folder)
    writing.write_output(str(strangers / "r.json"), b"{}")
    assert (strangers / "r.json").read_text() == "{}"


@needs_root
@pytest.mark.parametrize("calls", range(1, 6))
def test_a_pipe_that_takes_a_sockets_place_is_not_waited_for(strangers, monkeypatch, calls):
    """After any number of looks at the name, it is another user's pipe, which has no reader."""
    report, seen = strangers / "r.json", []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(report))
    as_stranger(lambda: os.mkfifo(strangers / "pipe"))

    def swapping(call):
        def wrapper(path, *arguments, **options):
            result = call(path, *arguments, **options)
            if path == report.name:
                seen.append(path)
                if len(seen) == calls:
                    os.replace(strangers / "pipe", report)
            return result

        return wrapper

    def hangs(*_):
        raise AssertionError("waits for the pipe's reader")

    for name in ("open", "stat"):
        monkeypatch.setattr(os, name, swapping(getattr(os, name)))
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(5)
    try:
        with pytest.raises(OSError):  # noqa: PT011 - of several kinds
            writing.write_output(str(report), b"{}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_an_own_pipes_reader_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.5; cat {tmp_path}/pipe"], stdout=subprocess.PIPE)
    writing.write_output(str(tmp_path / "pipe"), b"{}")
    assert reader.communicate(timeout=60)[0] == b"{}"


def test_output_reaches_standard_output_and_devices():
    code = "from cpulaunch.system.files.writing import write_output as w; w('/dev/stdout', b'x'); w('/dev/null', b'y')"
    assert subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout == b"x"


def test_an_error_file_is_written_but_nothing_else(tmp_path, victim):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writing.write_at_once(str(victim), b"new")
    writing.write_at_once(str(tmp_path / "pipe"), b"new")
    os.close(reader)
    with pytest.raises(OSError):  # noqa: PT011 - ENXIO
        writing.write_at_once(str(tmp_path / "pipe"), b"new")
    assert victim.read_text() == "new"


@needs_root
def test_an_error_file_in_a_shared_folder_may_be_no_other_name_of_a_file(strangers):
    own = strangers / "own"
    own.write_text("keep")
    os.link(own, strangers / "error.json")
    with pytest.raises(PermissionError, match="hard link"):
        writing.write_at_once(str(strangers / "error.json"), b"new")
    assert own.read_text() == "keep"


@needs_root
def test_the_name_of_a_foreign_file_cannot_be_removed_before_it_is_seen(strangers, monkeypatch):
    """With the name gone, the count of the file's names is one again."""
    own, error_file = strangers / "own", strangers / "error.json"
    own.write_text("keep")
    os.link(own, error_file)

    def opened(*arguments, **options):
        fd = original(*arguments, **options)
        if arguments[0] == error_file.name and arguments[1] & os.O_WRONLY:
            error_file.unlink()
        return fd

    original = os.open
    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(PermissionError, match="hard link"):
        writing.write_at_once(str(error_file), b"new")
    assert own.read_text() == "keep"


def identity(path):
    status = os.stat(path)
    return status.st_dev, status.st_ino


def permissions(path):
    status = os.stat(path)
    return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid


def test_an_empty_replacement_leaves_the_mapped_file_and_keeps_its_permissions(tmp_path, victim):
    victim.chmod(0o640)
    with victim.open() as file:
        writing.replace_by_empty(str(victim), identity(victim))
        assert file.read() == "keep"
    assert (victim.read_text(), permissions(victim)) == ("", (0o640, os.geteuid(), os.getegid()))
    assert list(tmp_path.iterdir()) == [victim]


def test_another_file_than_the_mapped_one_is_not_replaced(tmp_path, victim):
    (tmp_path / "mapped").touch()
    writing.replace_by_empty(str(victim), identity(tmp_path / "mapped"))
    (tmp_path / "link").symlink_to(victim)
    writing.replace_by_empty(str(tmp_path / "link"), identity(victim))
    assert victim.read_text() == "keep"
    assert (tmp_path / "link").is_symlink()


@needs_root
@pytest.mark.parametrize("bits", [0o4777, 0o2777, 0o7755])
def test_no_replacement_makes_a_set_user_id_program_of_a_strangers_file(strangers, bits):
    """The stranger, who may write to the file, would fill it with a program of root's."""
    for name in ("mapped", "output"):
        as_stranger(lambda name=name: (strangers / name).touch())
        as_stranger(lambda name=name: (strangers / name).chmod(bits))
    assert permissions(strangers / "mapped")[0] == bits
    writing.replace_by_empty(str(strangers / "mapped"), identity(strangers / "mapped"))
    writing.replace_unchanged(str(strangers / "output"), b"x", read=os.stat(strangers / "output"))
    for name in ("mapped", "output"):
        assert permissions(strangers / name) == (bits & 0o777, UID, UID)


@needs_root
@pytest.mark.parametrize(
    ("mode", "expected"), [(0o664, 0o644), (0o666, 0o666), (0o640, 0o600), (0o604, 0o600), (0o755, 0o755)]
)
def test_a_file_that_cannot_have_the_others_owner_and_group_permits_no_more(strangers, mode, expected):
    (strangers / "file").touch()
    (strangers / "file").chmod(mode)
    file = identity(strangers / "file")
    as_stranger(lambda: writing.replace_by_empty(str(strangers / "file"), file))
    assert permissions(strangers / "file") == (expected, UID, UID)


@needs_root
def test_the_group_of_a_shared_file_still_writes_to_its_replacement(strangers):
    (strangers / "file").touch()
    os.chown(strangers / "file", UID + 1, UID)
    (strangers / "file").chmod(0o664)
    file = identity(strangers / "file")
    as_stranger(lambda: writing.replace_by_empty(str(strangers / "file"), file))
    assert permissions(strangers / "file") == (0o664, UID, UID)


ACL, UNDEFINED = "system.posix_acl_access", 0xFFFFFFFF


def acl(*entries):
    """An ACL of entries (tag, permissions, id): 1 owner, 2 a user, 4 its group, 8 another group, 16 mask, 32 others."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries))


def set_acl(path, *entries, name=ACL):
    try:
        os.setxattr(path, name, acl(*entries))
    except OSError as error:
        pytest.skip(f"this file system has no ACLs: {error}")


def reads(path, uid, gid):
    pid = os.fork()
    if pid == 0:
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            os.close(os.open(path, os.O_RDONLY))
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


FRIEND, GROUP = UID + 1, UID + 2
ONE_FRIEND = (1, 6, UNDEFINED), (2, 6, FRIEND), (4, 0, UNDEFINED), (16, 6, UNDEFINED), (32, 0, UNDEFINED)


@needs_root
@pytest.mark.parametrize("replace", ["by_empty", "unchanged"])
def test_a_replacement_has_the_acl_and_opens_to_no_group(strangers, replace):
    """With an ACL, the group's bits of the mode say what named users have."""
    path = strangers / "file"
    path.write_text("secret")
    os.chown(path, 0, GROUP)
    set_acl(path, *ONE_FRIEND)
    before = os.getxattr(path, ACL)
    if replace == "by_empty":
        writing.replace_by_empty(str(path), identity(path))
    else:
        writing.replace_unchanged(str(path), b"new", read=os.stat(path))
    assert os.getxattr(path, ACL) == before
    assert (reads(path, FRIEND, FRIEND), reads(path, UID, GROUP), reads(path, UID, UID)) == (True, False, False)


@needs_root
@pytest.mark.parametrize("others", [0, 4])
def test_where_the_acl_cannot_be_kept_all_get_what_all_had(strangers, monkeypatch, others):
    path = strangers / "file"
    path.write_text("secret")
    os.chown(path, 0, GROUP)
    set_acl(path, *ONE_FRIEND[:-1], (32, others, UNDEFINED))

    def setxattr(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", setxattr)
    writing.replace_by_empty(str(path), identity(path))
    assert permissions(path) == (0o600, 0, GROUP)


@needs_root
def test_a_replacement_does_not_have_the_acl_of_new_files_in_its_folder(strangers):
    path = strangers / "file"
    path.write_text("secret")
    path.chmod(0o640)
    set_acl(strangers, *ONE_FRIEND, name="system.posix_acl_default")
    writing.replace_by_empty(str(path), identity(path))
    assert permissions(path)[0] == 0o640
    assert not reads(path, FRIEND, FRIEND)


@needs_root
@pytest.mark.parametrize("folder_owner", [0, UID + 1])
def test_a_log_that_another_user_owns_is_refused_in_a_folder_that_others_can_write(strangers, folder_owner):
    """That user reads everything that is written to it."""
    for name in ("log", "error.json"):
        as_stranger(lambda name=name: (strangers / name).touch())
    (strangers / "own").touch()
    os.chown(strangers, folder_owner, folder_owner)
    strangers.chmod(0o1777)
    folder = descriptor(strangers)
    with pytest.raises(PermissionError):  # Of the kernel, where fs.protected_regular is on.
        writing.open_log("log", folder=folder)
    with pytest.raises(PermissionError):
        writing.write_at_once(str(strangers / "error.json"), b"secret")
    os.close(writing.open_log("own", folder=folder))
    strangers.chmod(0o755)
    if folder_owner == 0:
        os.close(writing.open_log("log", folder=folder))
    os.close(folder)
    assert (strangers / "error.json").read_text() == ""
