"""Reading files under a root directory, without leaving it; malformed files are errors that name the file."""

import os
import stat
from pathlib import Path

import pytest

from cpulaunch.probe import Root
from cpulaunch.records.errors import ProbeError
from tests.nesting import nested_folders
from tests.opens import opens
from tests.strangers import needs_root


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_nuls_and_white_space_are_trimmed(tmp_path: Path) -> None:
    write(tmp_path / "a/mask", b"00000003\n\0\0\0")
    assert Root(str(tmp_path)).text("a/mask") == "00000003"
    assert Root(str(tmp_path)).cpumask("a/mask") == {0, 1}


@pytest.mark.parametrize("content", ["", "\n", "\0\0"])
def test_an_empty_file_has_no_value(tmp_path: Path, content: str) -> None:
    write(tmp_path / "file", content)
    root = Root(str(tmp_path))
    assert (root.text("file"), root.integer("file"), root.cpulist("file"), root.cpumask("file")) == (None,) * 4


def test_absence_is_not_an_error(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    assert root.text("no/such") is None
    assert root.ids("no/such") is None
    assert root.names("no") == []
    assert not root.exists("no")
    (tmp_path / "folder").mkdir()
    assert root.text("folder") is None


def test_absolute_links_start_at_the_root(tmp_path: Path) -> None:
    write(tmp_path / "machine/etc/name", "inside")
    write(tmp_path / "etc/name", "outside")
    (tmp_path / "machine/link").symlink_to("/etc/name")
    (tmp_path / "machine/folder").symlink_to("/etc")
    root = Root(str(tmp_path / "machine"))
    assert root.text("link") == "inside"
    assert root.text("folder/name") == "inside"
    assert root.names("folder") == ["name"]
    assert root.host_path("link") == str(tmp_path / "machine/etc/name")


@pytest.mark.parametrize("target", ["../secret", "../../../../../../../../{outside}/secret", "sub/../../secret"])
def test_no_link_leads_outside(tmp_path: Path, target: str) -> None:
    write(tmp_path / "secret", "outside")
    (tmp_path / "machine/sub").mkdir(parents=True)
    (tmp_path / "machine/link").symlink_to(target.format(outside=str(tmp_path).lstrip("/")))
    root = Root(str(tmp_path / "machine"))
    assert root.text("link") is None
    assert root.text("../secret") is None
    assert root.text("sub/../../secret") is None


@needs_root
@pytest.mark.parametrize("name", ["zeros", "folder/zeros", "link"])
def test_a_device_of_a_captured_machine_is_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("zeros")
    for place in (tmp_path, tmp_path / "folder"):
        os.mknod(place / "zeros", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    root = Root(str(tmp_path))
    assert root.bytes(name, limit=10) is None
    with pytest.raises(OSError, match="Invalid argument"):
        root.open(name)


def test_only_regular_files_of_a_captured_machine_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Invalid argument"):
        Root(str(tmp_path)).open("pipe")
    with pytest.raises(OSError, match="Invalid argument"):
        Root(str(tmp_path)).open(".")


def test_a_captured_machine_is_read_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "file", "content")
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert Root(str(tmp_path)).text("file") == "content"


def test_paths_longer_than_the_kernels_count_as_absent(tmp_path: Path) -> None:
    write(tmp_path / "file", "content")
    root = Root(str(tmp_path))
    for name in ("a/" * 60_000 + "file", "../" * 60_000 + "file"):
        assert root.text(name) is None
        assert not root.exists(name)
        assert root.names(name) == []


def test_links_that_make_paths_longer_are_limited(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a/" * 800 + "../" * 800 + "link")
    with pytest.raises(OSError, match="File name too long"):
        Root(str(tmp_path)).resolve_links("link")


def test_deeply_nested_folders_are_read(tmp_path: Path) -> None:
    """Without recursion, whose limit is 1,000."""
    root = Root(str(tmp_path))
    with nested_folders(tmp_path, "file") as path:
        assert root.bytes(path) == b""
        assert root.exists(path)


def test_two_slashes_are_one(tmp_path: Path) -> None:
    write(tmp_path / "folder/file", "content")
    write(tmp_path / "file", "another")
    assert Root(str(tmp_path)).text("folder//file") == "content"


def test_a_directory_link_is_followed_every_time(tmp_path: Path) -> None:
    write(tmp_path / "machine/devices/gpu/class", "0x030200")
    (tmp_path / "machine/bus").mkdir()
    (tmp_path / "machine/bus/0").symlink_to("../devices/gpu")
    root = Root(str(tmp_path / "machine"))
    assert [root.text("bus/0/class") for _ in range(2)] == ["0x030200"] * 2


def test_circular_links_count_as_absent(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    root = Root(str(tmp_path))
    assert root.text("a") is None
    assert root.text("a/x") is None
    assert root.names("a") == []
    assert not root.exists("a")


@pytest.mark.parametrize(
    ("method", "content"),
    [
        ("integer", "1_2"),
        ("integer", "٣"),
        ("integer", "9" * 21),
        ("cpumask", "-1"),
        ("integer", "12x"),
        ("cpulist", "0-x"),
        ("cpulist", "5-2"),
        ("cpumask", "zz,1"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, method: str, content: str) -> None:
    file = write(tmp_path / "sys/file", content)
    with pytest.raises(ProbeError) as caught:
        getattr(Root(str(tmp_path)), method)("sys/file")
    assert content in str(caught.value.value)
    assert caught.value.source == str(file)
    assert str(caught.value).count("\n") == 1


def test_the_list_has_precedence_over_the_mask(tmp_path: Path) -> None:
    write(tmp_path / "siblings", "00000001,00000003")
    root = Root(str(tmp_path))
    assert root.ids("siblings") == {0, 1, 32}
    write(tmp_path / "siblings_list", "4-5")
    assert root.ids("siblings") == {4, 5}


def test_a_limit_stops_reading(tmp_path: Path) -> None:
    write(tmp_path / "big", b"x" * 200_000)
    root = Root(str(tmp_path))
    assert len(root.bytes("big", limit=4096) or b"") == 4096
    assert len(root.bytes("big") or b"") == 200_000


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="needs /proc")
def test_a_link_to_what_the_kernel_makes_up_is_not_read(tmp_path: Path) -> None:
    """Such as another user's to the kernel's log, which is gone once it was read."""
    (tmp_path / "pyvenv.cfg").symlink_to("/proc/self/cmdline")
    assert Root().bytes(str(tmp_path / "pyvenv.cfg")) is None
    assert Root().bytes("proc/self/cmdline")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_does_not_stop_the_probe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    assert Root(str(tmp_path)).text("file") is None


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="Linux only")
def test_of_this_machine_what_is_no_file_is_not_opened_either(tmp_path: Path) -> None:
    """The open of a device may have effects. This one is a pipe, which anyone can make."""
    os.mkfifo(tmp_path / "pyvenv.cfg")
    assert not opens(tmp_path / "pyvenv.cfg", lambda: Root().text(str(tmp_path / "pyvenv.cfg")))
    write(tmp_path / "file", "content")
    (tmp_path / "link").symlink_to("file")
    assert Root().text(str(tmp_path / "link")) == "content"
    assert Root().text("proc/self/comm") is not None


def test_only_the_real_root_is_live(tmp_path: Path) -> None:
    assert Root().live
    assert Root("/").live
    assert not Root(str(tmp_path)).live
    assert Root("/").text(os.path.relpath(__file__, "/")) is not None
