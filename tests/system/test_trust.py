"""Which files and folders another user can change: by POSIX ACLs and by mounts. Modes are in test_libraries.py."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.probe.software.libraries import untrusted_part
from cpulaunch.system.files.mounts import foreign_mounts
from cpulaunch.system.trust import ACL, nfs4_writer
from tests.probe.libraries import elf_header
from tests.strangers import UID, as_other_user, needs_root

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ACLs and mounts of Linux")

UNDEFINED = 0xFFFFFFFF


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
    assert untrusted_part(Root(), str(path)) is None
    assert not writes(part)
    set_acl(part, (0x02, 7, UID))
    assert writes(part)
    assert untrusted_part(Root(), str(path)) == f"{part} may be written by user {UID}, by its ACL"


@needs_root
@pytest.mark.root
def test_the_mask_and_the_kind_of_permission_count(library: Path) -> None:
    set_acl(library, (0x02, 7, UID), mask=5)
    assert not writes(library)
    assert untrusted_part(Root(), str(library)) is None
    set_acl(library, (0x02, 5, UID))
    assert not writes(library)
    assert untrusted_part(Root(), str(library)) is None
    set_acl(library, (0x08, 6, UID))
    assert writes(library)
    assert untrusted_part(Root(), str(library)) == f"{library} may be written by group {UID}, by its ACL"
    set_acl(library, (0x02, 7, 0))
    assert not writes(library)
    assert untrusted_part(Root(), str(library)) is None


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


MOUNTINFO = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:40 / /home/eve/lib rw,nosuid,nodev - fuse.sshfs host:/lib rw,user_id=12345,group_id=12345,allow_other
31 27 0:41 / /srv rw - fuseblk /dev/sdb1 rw,user_id=0,group_id=0,allow_other
32 27 8:33 / /mnt/a\\040stick rw,nosuid,nodev,noexec - ext4 /dev/sdc1 rw
33 27 0:42 / /data shared:5 master:1 - nfs4 server:/data rw
34 27 0:43 / /srv/unnamed rw - fuse  rw,user_id=12345,group_id=12345,allow_other
broken line
"""


def test_file_systems_of_other_users_are_found() -> None:
    utab = "SRC=/dev/sdc1 TARGET=/mnt/a\\040stick ROOT=/ OPTS=user=eve\nSRC=/dev/sdb1 TARGET=/srv ROOT=/\n"
    found = dict(foreign_mounts(MOUNTINFO, utab))
    assert found == {
        os.makedev(0, 40): "is in a file system that user 12345 serves (FUSE)",
        os.makedev(8, 33): "is in a file system that user eve mounted",
        os.makedev(0, 43): "is in a file system that user 12345 serves (FUSE)",
    }


def test_a_library_in_such_a_file_system_is_untrusted(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == Path("/").stat().st_dev:
        pytest.skip("/dev/shm is not a mount")
    device = shm.stat().st_dev
    line = f"9 1 {os.major(device)}:{os.minor(device)} / {shm} rw - fuse.x x rw,user_id=12345,group_id=12345\n"
    monkeypatch.setattr(Root, "text", lambda self, name: line if name.endswith("mountinfo") else None)
    assert untrusted_part(Root(), str(library)) is None
    assert untrusted_part(Root(), str(shm)) == f"{shm} is in a file system that user 12345 serves (FUSE)"


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
        assert untrusted_part(Root(), str(library)) == expected
        acls.clear()
        assert untrusted_part(Root(), str(library)) is None
    finally:
        library.unlink()
