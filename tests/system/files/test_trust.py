"""Which files and folders another user can change: by POSIX ACLs and by mounts. Modes are in test_libraries.py."""

import errno
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.system.files import trust
from cpulaunch.system.files.acls import ACL, nfs4_writer
from cpulaunch.system.files.folders import make_secure_folder
from cpulaunch.system.files.mounts import mounter
from cpulaunch.system.files.trust import is_secure, untrusted_folder, untrusted_part
from tests.probe.libraries import elf_header
from tests.strangers import UID, as_other_user, as_stranger, folder_of_stranger, in_user_namespace, needs_root

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ACLs and mounts of Linux")

UNDEFINED = 0xFFFFFFFF
strangers = pytest.fixture(folder_of_stranger)


def set_acl(path: Path, *entries: tuple[int, int, int], mask: int = 7) -> None:
    """Give a file or folder an ACL: its owner may do all, others may read, and these entries (tag, permissions, id)."""
    rows = [(0x01, 7, UNDEFINED), (0x04, 5, UNDEFINED), *entries, (0x10, mask, UNDEFINED), (0x20, 5, UNDEFINED)]
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in sorted(rows))
    try:
        os.setxattr(path, ACL, data)
    except OSError as error:
        pytest.skip(f"this file system has no ACLs: {error}")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library that other users can read."""
    for folder in (tmp_path, *tmp_path.parents):
        if os.stat(folder).st_uid == os.geteuid() and not os.stat(folder).st_mode & 0o002:
            os.chmod(folder, 0o755)
    folder = tmp_path / "lib"
    folder.mkdir(mode=0o755)
    file = folder / "libtcmalloc_minimal.so.4"
    file.write_bytes(elf_header() + bytes(100))
    file.chmod(0o755)
    return file


def writes(path: Path) -> bool:
    """Whether another user can change a file, or replace what is in a folder."""

    def change() -> None:
        if path.is_dir():
            (path / "new").touch()
        else:
            path.open("r+b").close()

    return as_other_user(change)


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("where", ["file", "folder", "folder of a link's target"])
def test_what_an_acl_lets_another_user_write_is_untrusted(library: Path, tmp_path: Path, where: str) -> None:
    path = library
    if where == "folder of a link's target":
        (tmp_path / "links").mkdir(mode=0o755)
        path = tmp_path / "links/libtcmalloc.so.4"
        path.symlink_to(library)
    part = library if where == "file" else library.parent
    assert untrusted_part(str(path)) is None
    assert not writes(part)
    set_acl(part, (0x02, 7, UID))
    assert writes(part)
    assert untrusted_part(str(path)) == f"{part} may be written by user {UID}, by its ACL"


@needs_root
@pytest.mark.root
def test_the_mask_and_the_kind_of_permission_count(library: Path) -> None:
    set_acl(library, (0x02, 7, UID), mask=5)
    assert not writes(library)
    assert untrusted_part(str(library)) is None
    set_acl(library, (0x02, 5, UID))
    assert not writes(library)
    assert untrusted_part(str(library)) is None
    set_acl(library, (0x08, 6, UID))
    assert writes(library)
    assert untrusted_part(str(library)) == f"{library} may be written by group {UID}, by its ACL"
    set_acl(library, (0x02, 7, 0))
    assert not writes(library)
    assert untrusted_part(str(library)) is None


@needs_root
@pytest.mark.root
def test_a_library_with_such_an_acl_is_not_loaded_by_plan(library: Path) -> None:
    """The trial start of `plan` already runs the library's constructors."""
    set_acl(library, (0x02, 7, UID))
    environ = {"LD_LIBRARY_PATH": str(library.parent)}
    host = probe_host(Root(), interpreter=sys.executable, environ=environ, detail="launch")
    found = next(each for each in host.libraries if each.path == str(library))
    assert found.untrusted == f"{library} may be written by user {UID}, by its ACL"
    command = [sys.executable, "-m", "cpulaunch", "plan", "x.py"]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True)
    assert f"{library} may be written by user {UID}, by its ACL" in " ".join(done.stdout.split())
    assert str(library) not in "".join(line for line in done.stdout.splitlines() if line.startswith("  LD_PRELOAD "))


MOUNTINFO = b"""\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:40 / /home/eve/lib rw,nosuid,nodev - fuse.sshfs host:/lib rw,user_id=12345,group_id=12345,allow_other
31 27 0:41 / /srv rw - fuseblk /dev/sdb1 rw,user_id=0,group_id=0,allow_other
32 27 8:33 / /mnt/a\\040stick rw,nosuid,nodev,noexec - ext4 /dev/sdc1 rw
33 27 0:42 / /data shared:5 master:1 - nfs4 server:/data rw
34 27 0:43 / /srv/unnamed rw - fuse  rw,user_id=12345,group_id=12345,allow_other
35 27 0:44 / /tmp/x\x0ca\x1fb\xc2\x85c\xc2\xa0d\xe2\x80\xa8e\rf\xff rw - fuse x rw,user_id=12345,group_id=12345
36 27 0:45 / /sys/fs/fuse/connections rw - fusectl fusectl rw
37 27 0:46 / /odd rw - fuse x rw
broken line
38
39 27 0:47 / /cut rw -
"""
SERVED, MOUNTED, UNKNOWN = "serves (FUSE)", "user eve mounted", "mounted nowhere, or by an unknown user"


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        *((number, None) for number in ("27", "31", "33", "36")),
        *((number, f"that user 12345 {SERVED}") for number in ("30", "34", "35")),
        ("32", MOUNTED),
        ("37", SERVED),
        *((number, UNKNOWN) for number in ("broken", "38", "39", "40")),
    ],
)
def test_file_systems_of_other_users_are_found(mount: str, expected: str | None) -> None:
    utab = b"SRC=x\x0cTARGET=/srv OPTS=user=eve\n"
    utab += b"SRC=/dev/sdc1 TARGET=/mnt/a\\040stick ROOT=/ OPTS=user=eve\nSRC=/dev/sdb1 TARGET=/srv ROOT=/\n"
    found = mounter(mount.encode(), MOUNTINFO, utab)
    assert found is None if expected is None else expected in str(found)


IN_FUSE = """
import os, subprocess, sys, time
from cpulaunch.system.files.caches import others_access, read_lines
from cpulaunch.system.files.folders import make_secure_folder
from cpulaunch.system.files.trust import is_secure, untrusted_folder, untrusted_part
server, point, content = sys.argv[1:]
os.mkdir(point)
server = [sys.executable, server, point, f"lib.so={content}", f"trials={content}"]
server = subprocess.Popen(server, stdout=subprocess.PIPE)
if server.stdout.readline() != b"serving\\n":
    sys.exit("no FUSE")
print(os.stat(point).st_uid, open(f"{point}/lib.so").readline().strip())
print(untrusted_part(f"{point}/lib.so"))
print(is_secure(point), is_secure("/tmp"), is_secure("/proc"))
try:
    print(make_secure_folder(point))
except PermissionError as error:
    print(error.strerror)
print(read_lines(f"{point}/trials", header="head", max_bytes=99))
fd = os.open(f"{point}/trials", os.O_RDONLY)
print(others_access(fd))
subprocess.run(["umount", "--lazy", point], check=True)
print(others_access(fd))
os.close(fd)
server.wait()
"""


@needs_root
@pytest.mark.parametrize("name", ["plain", "x\fa\x1fb\x85c\u2028d\re"])
def test_nothing_in_another_users_fuse_is_trusted(library: Path, name: str) -> None:
    """That user says that root owns the files, names the mount point, and may unmount it at any moment."""
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("no FUSE")
    folder = library.parent
    (folder / "content").write_text("head\nforged\n")
    arguments = (Path(__file__).parents[2] / "fuse.py", folder / name, folder / "content")
    command = ["unshare", "--mount", sys.executable, "-c", IN_FUSE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False)
    if b"no FUSE" in done.stderr:
        pytest.skip("no FUSE here")
    assert done.stderr == b""
    owner, *lines = done.stdout.decode().replace(str(folder / name), "POINT").split("\n")
    serves = f"is in a file system that user {UID} serves (FUSE)"
    assert owner == "0 head"
    assert lines == [
        f"POINT {serves}",
        "False True True",
        f"POINT {serves}, so that other users can change it",
        "[]",
        f"it {serves}",
        "it is in a file system that is mounted nowhere, or by an unknown user",
        "",
    ]


def nfs4_acl(*entries: tuple[int, int, int, str]) -> bytes:
    """An NFSv4 ACL as the kernel shows it: a count, and type, flags, permissions and name of each entry."""
    data = struct.pack(">I", len(entries))
    for kind, flags, permissions, who in entries:
        name = who.encode()
        data += struct.pack(">IIII", kind, flags, permissions, len(name)) + name + bytes(-len(name) % 4)
    return data


READ, WRITE, APPEND, DELETE_CHILD, ALL = 0x1, 0x2, 0x4, 0x40, 0x1F01FF
FROM_MODE = ((0, 0, ALL, "OWNER@"), (0, 0x40, 0x1200A9, "GROUP@"), (0, 0, 0x1200A9, "EVERYONE@"))
"""What a server makes of mode 0755."""


@pytest.mark.parametrize(
    ("entries", "writer"),
    [
        (FROM_MODE, None),
        ((*FROM_MODE, (0, 0, READ, "eve@example.org")), None),
        ((*FROM_MODE, (0, 0, WRITE, "eve@example.org")), "user eve@example.org"),
        ((*FROM_MODE, (0, 0, APPEND, "4711")), "user 4711"),
        ((*FROM_MODE, (0, 0, DELETE_CHILD, "4711")), "user 4711"),
        ((*FROM_MODE, (0, 0, 0x40000, "4711")), "user 4711"),
        ((*FROM_MODE, (1, 0, WRITE, "eve@example.org")), None),  # Denied.
        ((*FROM_MODE, (0, 0x08 | 0x02, WRITE, "eve@example.org")), None),  # For what is made in the folder.
        ((*FROM_MODE, (0, 0, WRITE, "EVERYONE@")), "everyone"),
        ((*FROM_MODE, (0, 0x40, WRITE, "GROUP@")), "group 77"),
        ((*FROM_MODE, (0, 0x40, WRITE, "staffers@example.org")), "group staffers@example.org"),
        ((*FROM_MODE, (0, 0x40, WRITE, "0")), None),
        ((*FROM_MODE, (0, 0, ALL, "root@example.org"), (0, 0, ALL, "0"), (0, 0, ALL, str(os.geteuid()))), None),
    ],
)
def test_who_may_write_by_an_nfsv4_acl(entries: tuple[tuple[int, int, int, str], ...], writer: str | None) -> None:
    said = None if writer is None else f"may be written by {writer}, by its NFSv4 ACL"
    assert nfs4_writer(nfs4_acl(*entries), owner=os.geteuid(), group=77) == said


@pytest.mark.parametrize("length", [5, 19, 24, 40])
def test_an_nfsv4_acl_that_is_cut_off_is_not_trusted(length: int) -> None:
    acl = nfs4_acl(*FROM_MODE)[:length]
    assert nfs4_writer(acl, owner=os.geteuid(), group=0) == "has an NFSv4 ACL that cannot be read"


def test_an_nfsv4_acl_counts_on_every_file_system_but_the_first(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test has a server of NFS: what its client answers is put in place of the call."""
    if os.stat(library).st_dev == os.stat("/").st_dev:
        library = Path("/dev/shm") / f"libtcmalloc.so.{os.getpid()}"
        library.write_bytes(b"")
    acls = {str(library): nfs4_acl(*FROM_MODE, (0, 0, WRITE, "eve@example.org"))}

    def getxattr(path: str, name: str) -> bytes:
        if name == "system.nfs4_acl" and path in acls:
            return acls[path]
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "getxattr", getxattr)
    try:
        expected = f"{library} may be written by user eve@example.org, by its NFSv4 ACL"
        assert untrusted_part(str(library)) == expected
        acls.clear()
        assert untrusted_part(str(library)) is None
    finally:
        library.unlink()


@pytest.mark.parametrize(
    ("permissions", "is_safe"), [(WRITE | APPEND | DELETE_CHILD, True), (0x40000, False), (0x80000, False)]
)
def test_who_may_change_the_permissions_of_a_sticky_folder_can_change_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch, permissions: int, is_safe: bool
) -> None:
    """Of mode 1777, a Linux server makes permission to remove what is in the folder; the sticky bit still counts."""
    if os.stat("/dev/shm").st_dev == os.stat("/").st_dev:
        pytest.skip("NFSv4 ACLs do not count on the first file system")
    acl = nfs4_acl(*FROM_MODE, (0, 0, permissions, "EVERYONE@"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.chmod(folder, 0o1777)

        def getxattr(path: str, name: str) -> bytes:
            if (path, name) == (folder, "system.nfs4_acl"):
                return acl
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "getxattr", getxattr)
        assert is_secure(folder) is is_safe


@needs_root
@pytest.mark.parametrize("way", ["lib", "lib/../../{name}/lib", "lib/../../../usr/lib"])
def test_what_another_user_can_move_away_and_back_is_untrusted(strangers: Path, way: str) -> None:
    """It is checked while it is away, and loaded when it is back."""
    path = f"{strangers}/{way.format(name=strangers.name)}/libtcmalloc.so.4"
    as_stranger(lambda: (strangers / "lib").mkdir())
    assert untrusted_part(path) == f"{strangers} belongs to user {UID}"
    away = strangers.with_name(f"{strangers.name}-away")
    os.rename(strangers, away)  # Its owner may do so too, as /tmp is sticky.
    try:
        for may_be_missing in (False, True):
            assert untrusted_part(path, may_be_missing=may_be_missing) == f"{strangers} is missing"
    finally:
        os.rename(away, strangers)


def test_what_is_missing_is_harmless_where_others_can_make_nothing(library: Path) -> None:
    missing, folder = f"{library.parent}/missing/file", library.parent
    assert untrusted_part(missing) == f"{folder}/missing is missing"
    assert untrusted_part(missing, may_be_missing=True) is None
    folder.chmod(0o1777)
    assert untrusted_part(missing, may_be_missing=True) == f"{folder}/missing is missing"
    assert untrusted_part(f"{library}/x", may_be_missing=True) == f"{library}/x cannot be checked (Not a directory)"
    assert "cannot be checked" in str(untrusted_part(f"{folder}/a\0b", may_be_missing=True))
    (folder / "own").mkdir()
    assert untrusted_part(f"{folder}/own/missing", may_be_missing=True) is None
    assert untrusted_part(f"{folder}/own/../missing", may_be_missing=True) == f"{folder}/missing is missing"


@needs_root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "is_safe"), [(0, 0, 0o700, True), (54321, 0, 0o700, False), (0, 54321, 0o1730, False)]
)
def test_what_is_in_a_folder_that_this_user_cannot_enter_is_not_loaded(
    strangers: Path, owner: int, group: int, mode: int, is_safe: bool
) -> None:
    """The folder is root's, as /root is; or one that a third user may open, or in which a group makes files."""
    os.chown(strangers, owner, group)
    strangers.chmod(mode)

    def check() -> None:
        assert untrusted_part(f"{strangers}/lib") is not None
        for reason in (untrusted_part(f"{strangers}/lib", may_be_missing=True), untrusted_folder(f"{strangers}/lib")):
            assert (reason is None) == is_safe

    as_stranger(check)


def test_links_are_followed_as_the_kernel_does(library: Path, tmp_path: Path) -> None:
    (tmp_path / "lib/deep").mkdir()
    (tmp_path / "link").symlink_to("lib/./deep/")
    (tmp_path / "circle").symlink_to("circle")
    assert untrusted_part(f"{tmp_path}/link/..//{library.name}") is None
    assert untrusted_part(f"{tmp_path}/link/../deep/.") is None
    assert "symbolic links" in str(untrusted_part(f"{tmp_path}/circle"))
    (tmp_path / "lib").chmod(0o777)
    assert untrusted_part(f"{tmp_path}/link") == f"{tmp_path}/lib may be written by everyone"


def test_a_folder_whose_files_others_can_make_is_not_made_secure(library: Path) -> None:
    """SQLite and torch open files in it that need not be there."""
    folder = library.parent
    folder.chmod(0o775)
    if os.stat(folder).st_gid == os.geteuid():
        assert make_secure_folder(str(folder)) == str(folder)
    folder.chmod(0o1777)
    assert is_secure(str(folder))
    with pytest.raises(PermissionError, match="may be written by others"):
        make_secure_folder(str(folder))
    assert make_secure_folder(f"{folder}/new") == f"{folder}/new"


@needs_root
@pytest.mark.parametrize(("group", "expected"), [(UID, "made"), (UID + 1, "may be written by group")])
def test_in_a_user_namespace_a_group_counts_by_its_number_outside(strangers: Path, group: int, expected: str) -> None:
    """`unshare -r` gives the number 0 to whatever group the user is in."""
    os.chown(strangers, UID, group)
    strangers.chmod(0o775)

    def make() -> None:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {UID} 1")
        try:
            path = make_secure_folder(f"{strangers}/new")
        except PermissionError as error:
            path = f"{error.strerror}"
        said = "made" if path == f"{strangers}/new" else path
        if expected not in said or "belongs to" in said:
            os.write(2, said.encode())
            raise OSError(said)

    in_user_namespace(make)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.EACCES, errno.EIO, errno.ENOENT])
@pytest.mark.parametrize("may_be_missing", [False, True])
def test_a_file_system_that_answers_no_more_is_untrusted(
    library: Path, monkeypatch: pytest.MonkeyPatch, number: int, may_be_missing: bool
) -> None:
    """Of NFS, or FUSE: fstat(2) fails, and names no file."""

    def gone(status: os.stat_result, fd: int = -1) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(trust, "is_trusted", gone)
    reason = untrusted_part(str(library), may_be_missing=may_be_missing)
    missing = number == errno.ENOENT
    assert reason == f"{library} {'is missing' if missing else f'cannot be checked ({os.strerror(number)})'}"


@needs_root
def test_the_group_with_this_users_number_counts_as_another_user_only_for_code(strangers: Path) -> None:
    """Kubernetes gives a volume to `fsGroup`, which may be the number of the user who runs in the container."""
    os.chown(strangers, 0, UID)
    strangers.chmod(0o2775)

    def make() -> None:
        with pytest.raises(PermissionError, match=f"may be written by group {UID}"):
            make_secure_folder(f"{strangers}/new")
        assert make_secure_folder(f"{strangers}/new", users_group=True) == f"{strangers}/new"
        assert os.stat(f"{strangers}/new").st_mode & 0o777 == 0o700

    as_stranger(make)


@needs_root
@pytest.mark.parametrize("mode", [0o2775, 0o3775], ids=oct)
def test_a_volume_of_this_users_group_itself_may_be_sticky(strangers: Path, mode: int) -> None:
    os.chown(strangers, 0, UID)
    strangers.chmod(mode)

    def make() -> None:
        with pytest.raises(PermissionError, match="may be written by"):
            make_secure_folder(str(strangers))
        assert make_secure_folder(str(strangers), users_group=True) == str(strangers)

    as_stranger(make)


@needs_root
@pytest.mark.parametrize(("group", "mode"), [(UID + 1, 0o3775), (UID, 0o3777)])
def test_a_sticky_volume_in_which_others_can_make_files_is_refused(strangers: Path, group: int, mode: int) -> None:
    os.chown(strangers, 0, group)
    strangers.chmod(mode)

    def make() -> None:
        with pytest.raises(PermissionError, match="may be written by others"):
            make_secure_folder(str(strangers), users_group=True)

    as_stranger(make)
