"""Files that a stranger may have replaced are read without waiting, without links, and not beyond a limit."""

import os
import signal
import sys
import tempfile

import pytest

from cpulaunch.system.files.reading import note_time, open_regular, read_end, read_lines_at_ends, read_start
from tests.opens import opens

READERS = [read_start, read_end, read_lines_at_ends]


def make_pipe(path):
    os.mkfifo(path)


def make_link(path):
    path.symlink_to("/etc/hostname")


def make_endless(path):
    path.symlink_to("/dev/zero")


def make_folder(path):
    path.mkdir()


@pytest.fixture
def _deadline():
    """An open that waits fails the test, and does not hang it."""
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.usefixtures("_deadline")
@pytest.mark.parametrize("make", [make_pipe, make_link, make_endless, make_folder])
@pytest.mark.parametrize("read", READERS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, make, read):
    make(tmp_path / "file")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):  # noqa: PT011 - of several kinds
        read(str(tmp_path / "file"), max_bytes=10)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("file", ["/proc/self/cmdline", "/proc/kmsg", "/sys/kernel/mm/transparent_hugepage/enabled"])
def test_what_the_kernel_makes_up_is_not_opened(tmp_path, file):
    """Anyone can make a link to the kernel's log, which is gone once it was read."""
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(str(tmp_path / "link"), links=True)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux's /dev/shm")
@pytest.mark.parametrize("content", [b"", b"text"])
def test_files_in_memory_are_read(content):
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(content)
        file.flush()
        assert read_start(file.name, max_bytes=10) == content


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("links", [False, True])
def test_what_is_no_regular_file_is_not_even_opened(tmp_path, links):
    """The open of a device may have effects. This one is a pipe, which anyone can make."""

    def try_to_open():
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(str(tmp_path / "pipe"), links=links)

    os.mkfifo(tmp_path / "pipe")
    assert not opens(tmp_path / "pipe", try_to_open)


def test_a_link_is_followed_where_that_is_asked_for(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    fd = open_regular(str(tmp_path / "link"), links=True)
    assert os.read(fd, 9) == b"text"
    os.close(fd)


def test_no_more_is_read_than_asked_for(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_start(str(path), max_bytes=4) == b"0123"
    assert read_end(str(path), max_bytes=4) == b"6789"
    assert read_start(str(path), max_bytes=99) == read_end(str(path), max_bytes=99) == b"0123456789"


def test_a_name_is_found_in_a_folder(tmp_path):
    (tmp_path / "file").write_text("text")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        assert read_start("file", max_bytes=9, folder=folder) == b"text"
    finally:
        os.close(folder)


@pytest.mark.parametrize(
    ("content", "limit", "expected"),
    [
        (b"a\nb\n", 99, (["a", "b"], 0)),
        (b"aa\nbb\ncc\ndd\n", 8, (["aa", "dd"], 7)),
        (b"aa\nbb\n" + b"x" * 99, 8, (["aa"], 103)),
        (b"\xff\n", 99, (["\ufffd"], 0)),
    ],
    ids=["whole", "its ends", "one long line", "no UTF-8"],
)
def test_whole_lines_at_both_ends_are_read(tmp_path, content, limit, expected):
    (tmp_path / "file").write_bytes(content)
    lines, unread_bytes = read_lines_at_ends(str(tmp_path / "file"), max_bytes=limit)
    assert (list(lines), unread_bytes) == expected


def test_a_noted_time_is_the_given_one_also_of_a_link(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "theirs").touch()
    (tmp_path / "link").symlink_to("theirs")
    before = (tmp_path / "theirs").stat().st_mtime
    folder = os.open(tmp_path, os.O_RDONLY)
    for name in ("file", "link", "missing"):
        note_time(name, 1.5, folder=folder)
    os.close(folder)
    assert [(tmp_path / name).lstat().st_mtime for name in ("file", "link", "theirs")] == [1.5, 1.5, before]
