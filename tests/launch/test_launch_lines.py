"""Streams that share a sink, without processes: the order of feeds, and the resulting file."""

import os
import pty
import socket
import struct
import tty

import pytest

from cpulaunch.launch.output.sink import Sink, SinkError
from cpulaunch.launch.output.streams import LINE_BYTES, OutputRoute, Stream
from cpulaunch.system.libc import is_linux

LONG = b"x" * LINE_BYTES


def written(path, feeds, *, prefixes=(b"[0] ", b"[1] "), finish=True):
    """What a file holds after routes 0 and 1 were fed (route, data) in this order."""
    sink = Sink(os.open(path, os.O_WRONLY | os.O_CREAT), name="file")
    routes = [OutputRoute(sink, prefix=prefix, exclusive=False) for prefix in prefixes]
    for index, data in feeds:
        if data is None:
            routes[index].break_line()
        else:
            routes[index].feed(data)
    if finish:
        for route in routes:
            route.finish()
    sink.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("feeds", "expected"),
    [
        ([(0, b"a\n"), (1, b"b\n")], b"[0] a\n[1] b\n"),
        ([(0, b"a\nb\nc\n")], b"[0] a\n[0] b\n[0] c\n"),
        ([(0, b"\n\n")], b"[0] \n[0] \n"),
        ([(0, b"a"), (1, b"b\n"), (0, b"c\n")], b"[1] b\n[0] ac\n"),
        ([(0, b"a\nb"), (1, b"c\n")], b"[0] a\n[1] c\n[0] b\n"),
        ([(0, b"a\r\nb\r\n")], b"[0] a\r\n[0] b\r\n"),
        ([(0, b"a\r"), (1, b"b\n"), (0, b"\n")], b"[1] b\n[0] a\r\n"),
        ([(0, b"10%\r20%"), (1, b"b\n")], b"[0] 10%\r\n[1] b\n[0] 20%\n"),
        ([(0, b"10%\r20%"), (0, b"\r30%\n"), (1, b"b\n")], b"[0] 10%\r[0] 20%\r[0] 30%\n[1] b\n"),
        ([(0, b"a\rb\n")], b"[0] a\r[0] b\n"),
        ([(0, b"a\rb\r"), (0, b"c\r\n")], b"[0] a\r[0] b\r[0] c\r\n"),
        ([(0, LONG), (1, b"b\n"), (0, b"y\n")], b"[0] " + LONG + b"y\n[1] b\n"),
        ([(0, LONG), (1, b"b"), (0, b"y\nz")], b"[0] " + LONG + b"y\n[0] z\n[1] b\n"),
        ([(0, LONG), (1, b"b\n"), (0, None), (0, b"y\n")], b"[0] " + LONG + b"\n[1] b\n[0] y\n"),
        ([(0, LONG), (1, LONG), (0, b"\n")], b"[0] " + LONG + b"\n[1] " + LONG + b"\n"),
        ([(0, LONG), (1, b"b\n")], b"[0] " + LONG + b"\n[1] b\n"),
        ([(0, b"\0\xff\n")], b"[0] \0\xff\n"),
    ],
)
def test_lines_stay_whole(tmp_path, feeds, expected):
    assert written(tmp_path / "file", feeds) == expected


def test_a_line_erases_the_progress_bar_of_another_worker():
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    sink = Sink.for_inherited(theirs, name="terminal")
    bar, other = (OutputRoute(sink, prefix=prefix, exclusive=False) for prefix in (b"[0] ", b"[1] "))
    bar.feed(b"50%|#####     |\r60%")
    other.feed(b"line\n")
    bar.finish()
    sink.close()
    expected = b"[0] 50%|#####     |\r\x1b[K[1] line\n[0] 60%\n"
    shown = b""
    while len(shown) < len(expected):  # The kernel hands a terminal's output over in pieces.
        shown += os.read(ours, 1000)
    os.close(ours)
    os.close(theirs)
    assert shown == expected


@pytest.mark.parametrize(
    ("feeds", "expected"),
    [
        ([(0, b"a\n"), (1, b"b")], b"a\nb"),
        ([(0, b"a"), (1, b"b\n")], b"b\na"),
        ([(0, b"a"), (1, b"b")], b"a\nb"),
    ],
)
def test_a_log_ends_without_a_newline_if_its_writer_wrote_none(tmp_path, feeds, expected):
    assert written(tmp_path / "file", feeds, prefixes=(b"", b"")) == expected


def test_a_stream_keeps_its_last_lines():
    read, write = os.pipe()
    stream = Stream(read, routes=[])
    for number in range(100):
        os.write(write, b"line %d\n" % number)
    os.write(write, b"no newline \xff")
    os.close(write)
    while stream.transfer():
        pass
    stream.close()
    assert stream.last_lines() == (*(f"line {number}" for number in range(81, 100)), "no newline \ufffd")


@pytest.mark.skipif(not is_linux(), reason="needs /proc")
def test_a_stream_whose_next_byte_cannot_be_read_has_ended():
    """As in a pipe into which a worker has spliced a page of a broken disk; here it is memory that is no one's."""
    stream = Stream(os.open("/proc/self/mem", os.O_RDONLY), routes=[])
    assert not stream.transfer()
    stream.close()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", ()),
        (b"\n", ("",)),
        (b"a\r\nb\r\n", ("a", "b")),
        (b"\r 10%\r 20%\r 30%\nreason\n", (" 30%", "reason")),
        (b"\r 99%" * 5000, (" 99%",)),
        (b"\r 99%" * 5000 + b"\nreason\n", ("reason",)),
    ],
)
def test_last_lines_are_as_a_terminal_shows_them(text, lines):
    read, write = os.pipe()
    stream = Stream(read, routes=[])
    os.write(write, text)
    os.close(write)
    while stream.transfer():
        pass
    stream.close()
    assert stream.last_lines() == lines


def test_a_sink_without_a_reader_discards_everything():
    read, write = os.pipe()
    sink = Sink(write, name="pipe")
    os.close(read)
    sink.send(b"text")
    assert sink.reader_gone
    sink.send(b"more")
    assert not sink.has_pending


def test_a_connection_that_is_reset_has_no_reader():
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    sink = Sink(ours.fileno(), name="socket")
    sink.send(b"text")
    assert sink.reader_gone
    ours.close()
    listener.close()


def test_a_failed_sink_is_not_congested(tmp_path):
    read, write = os.pipe()
    os.set_blocking(write, False)
    sink = Sink(write, name="pipe")
    sink.send(b"x" * (2 << 20))
    assert sink.congested
    os.dup2(os.open("/dev/full", os.O_WRONLY), write)
    with pytest.raises(SinkError):
        sink.flush()
    assert not sink.congested
    assert not sink.has_pending
    sink.close()
    os.close(read)


def test_a_slow_reader_gets_everything_in_order():
    read, write = os.pipe()
    os.set_blocking(write, False)
    sink = Sink(write, name="pipe")
    sent = b"".join(b"%d\n" % number for number in range(300_000))
    for at in range(0, len(sent), 50_000):
        sink.send(sent[at : at + 50_000])
    assert sink.congested
    got = b""
    while sink.has_pending:
        got += os.read(read, 1 << 16)
        sink.flush()
    sink.close()
    while data := os.read(read, 1 << 16):
        got += data
    assert got == sent
