"""Output that is left when all workers have ended is read, and none that others go on to write.

A worker in the middle of a long line does not hold up others for ever.
"""

import os
import select

import pytest

from cpulaunch.launch.output.pump import HELD_BYTES, HELD_SECONDS, STALL_SECONDS, Pump
from cpulaunch.launch.output.sink import BUFFER_BYTES, Sink
from cpulaunch.launch.output.streams import LINE_BYTES, OutputRoute, Stream

LEFT, MOST = b"left\n" * 20, 9


class WritingReader:
    """A reader of a metric; what it is given, a process that has not ended writes again."""

    def __init__(self, pipe):
        self.given = []
        self._pipe = pipe

    def feed(self, data):
        assert len(self.given) < MOST, "the launch reads without end"
        self.given.append(data)
        os.write(self._pipe, data)

    def finish(self):
        pass


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.write(write, LEFT)
    yield read, write
    os.close(write)


def test_what_is_written_after_the_end_of_the_workers_is_not_read(pipe):
    read, write = pipe
    reader = WritingReader(write)
    pump = Pump(select.poll(), streams=[Stream(read, routes=[], reader=reader)], sinks=[])
    pump.limit()
    assert [pump.drain(), pump.drain(), pump.has_unread_output] == [True, False, False]
    assert [pump.finish(), pump.finish()] == [True, False]
    assert reader.given == [LEFT]


def test_a_stream_that_waited_for_a_slow_reader_ends_after_what_was_left(pipe):
    read, write = pipe
    slow, end = os.pipe()
    os.set_blocking(end, False)
    sink, earlier = Sink(end, name="out"), bytes(2 << 20)
    sink.send(earlier)
    pump = Pump(select.poll(), streams=[Stream(read, routes=[OutputRoute(sink, exclusive=True)])], sinks=[sink])
    pump.limit()
    os.write(write, b"later")
    assert not pump.drain()
    assert pump.has_unread_output
    shown = bytearray()
    while sink.has_pending or pump.owns(read):
        shown += os.read(slow, 1 << 20)
        sink.flush()
        if not sink.congested:
            pump.serve(read)
    sink.close()
    assert shown + os.read(slow, 1 << 20) == earlier + LEFT
    os.close(slow)


def test_a_log_has_what_was_left_although_the_reader_of_another_sink_is_abandoned(pipe, tmp_path):
    read, _ = pipe
    slow, end = os.pipe()
    os.set_blocking(end, False)
    path = tmp_path / "log"
    sink, log = Sink(end, name="out"), Sink(os.open(path, os.O_WRONLY | os.O_CREAT), name="log")
    sink.send(bytes(2 << 20))
    routes = [OutputRoute(each, exclusive=True) for each in (sink, log)]
    pump = Pump(select.poll(), streams=[Stream(read, routes=routes)], sinks=[sink, log])
    pump.limit()
    assert not pump.drain()
    pump.abandon_waiting()
    assert [pump.drain(), pump.has_unread_output, pump.all_written] == [True, False, True]
    assert path.read_bytes() == LEFT
    pump.finish()
    for each in (sink, log):
        each.close()
    os.close(slow)


def test_all_logs_have_what_was_left_although_it_fills_the_sink_of_a_slow_reader(tmp_path):
    """Nothing waits for the reader before, and all of it is more than memory should hold."""
    slow, end = os.pipe()
    os.set_blocking(end, False)
    sink, line = Sink(end, name="out"), b"x" * 8191 + b"\n"
    logs, streams = [], []
    for number in range(8 + BUFFER_BYTES // (4 * len(line))):
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.write(write, 4 * line)
        os.close(write)
        logs.append(Sink(os.open(tmp_path / str(number), os.O_WRONLY | os.O_CREAT), name="log"))
        routes = [OutputRoute(sink, prefix=b"0:", exclusive=False), OutputRoute(logs[-1], exclusive=True)]
        streams.append(Stream(read, routes=routes))
    pump = Pump(select.poll(), streams=streams, sinks=[sink, *logs])
    pump.limit()
    while pump.drain() or pump.abandon_waiting():
        continue
    while pump.finish():
        continue
    assert all(path.read_bytes() == 4 * line for path in tmp_path.iterdir())
    for each in (sink, *logs):
        each.close()
    os.close(slow)


@pytest.mark.parametrize("abandoned", [True, False])
def test_a_log_has_what_was_left_although_another_worker_is_in_the_middle_of_a_long_line(pipe, tmp_path, abandoned):
    """`abandoned`: the reader is slow as well."""
    read, _ = pipe
    slow, end = os.pipe()
    os.set_blocking(end, False)
    path = tmp_path / "log"
    out = end if abandoned else os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    sink, log = Sink(out, name="out"), Sink(os.open(path, os.O_WRONLY | os.O_CREAT), name="log")
    long, waiting = (OutputRoute(sink, prefix=b"0:", exclusive=False) for _ in range(2))
    long.feed(b"." * LINE_BYTES)
    waiting.feed(b"x" * (LINE_BYTES - 1) + b"\n")
    pump = Pump(
        select.poll(), streams=[Stream(read, routes=[waiting, OutputRoute(log, exclusive=True)])], sinks=[sink, log]
    )
    pump.limit()
    while pump.drain() or pump.abandon_waiting():
        continue
    assert path.read_bytes() == LEFT
    pump.finish()
    for each in (sink, log):
        each.close()
    os.close(slow)


class TwoWorkers:
    """A file that two workers write: one in the middle of a long line, and one that waits with many whole lines."""

    def __init__(self, path):
        self._sink = Sink(os.open(path, os.O_WRONLY | os.O_CREAT), name="out")
        self._path = path
        self.long, self.waiting = (OutputRoute(self._sink, prefix=prefix, exclusive=False) for prefix in (b"0:", b"1:"))
        self.pipes = [os.pipe() for _ in range(2)]
        streams = [
            Stream(read, routes=[route]) for (read, _), route in zip(self.pipes, (self.long, self.waiting), strict=True)
        ]
        self.pump = Pump(select.poll(), streams=streams, sinks=[self._sink])
        self.begin_long_line()

    def begin_long_line(self, other=b"x" * (LINE_BYTES - 1) + b"\n"):
        self.long.feed(b"." * LINE_BYTES)
        self.waiting.feed(other)

    def write(self, data, now):
        (read, write), _ = self.pipes
        os.write(write, data)
        self.pump.serve(read)
        self.pump.update_polling(now)

    def held_seconds(self, pause):
        """How long the other worker waits for one that writes a byte after each pause."""
        now = 0.0
        self.pump.update_polling(now)
        while self.waiting.must_wait:
            assert self.pump.deadline is not None
            assert now < HELD_SECONDS
            now += pause
            self.write(b".", now)
        return now

    def lines(self):
        with open(self._path, "rb") as file:
            return file.read().split(b"\n")

    def close(self):
        for fd in (*self.pipes[0], *self.pipes[1], self._sink.fd):
            os.close(fd)


@pytest.fixture
def workers(tmp_path):
    made = TwoWorkers(tmp_path / "out")
    yield made
    made.close()


def test_a_worker_that_goes_on_writing_a_long_line_holds_up_others_for_a_limited_time(workers):
    assert workers.held_seconds(STALL_SECONDS / 4) == HELD_SECONDS
    assert [line[:2] for line in workers.lines()] == [b"0:", b"1:", b""]
    workers.begin_long_line()
    assert workers.held_seconds(STALL_SECONDS / 4) == STALL_SECONDS


def test_a_worker_whose_last_long_line_ended_in_time_has_as_long_as_any_again(workers):
    workers.held_seconds(STALL_SECONDS / 4)
    workers.begin_long_line()
    workers.pump.update_polling(0.0)
    workers.write(b"end\n", STALL_SECONDS / 2)
    workers.begin_long_line()
    assert workers.held_seconds(STALL_SECONDS / 4) == HELD_SECONDS


def test_a_few_bytes_wait_no_longer_than_many(workers):
    workers.write(b"\n", 0.0)
    workers.begin_long_line(b"HELLO\n")
    assert workers.held_seconds(STALL_SECONDS / 4) == HELD_SECONDS
    assert workers.lines()[-2] == b"1:HELLO"


def test_a_line_is_whole_while_others_have_nothing_to_show(workers):
    workers.write(b"\n", 0.0)
    workers.begin_long_line(b"no whole line")
    for now in (0.0, 2 * HELD_SECONDS):
        workers.write(b".", now)
        assert workers.pump.deadline is None


def test_a_line_is_whole_if_the_launch_was_stopped_meanwhile(workers):
    workers.pump.update_polling(0.0)
    workers.pump.update_polling(60 * HELD_SECONDS)
    workers.write(b"end\n", 60 * HELD_SECONDS + STALL_SECONDS / 2)
    assert [line[:2] + line[-3:] for line in workers.lines()[:2]] == [b"0:end", b"1:xxx"]


def test_the_time_of_a_slow_reader_does_not_count(workers, monkeypatch):
    workers.pump.update_polling(0.0)
    monkeypatch.setattr(Sink, "congested", True)
    now = 0.0
    while now < 2 * HELD_SECONDS:
        now += STALL_SECONDS / 2
        workers.pump.update_polling(now)
        assert workers.pump.deadline > now
    monkeypatch.undo()
    workers.pump.update_polling(now)
    workers.write(b"end\n", now + STALL_SECONDS / 2)
    assert workers.lines()[0].endswith(b".end")


def test_a_line_without_an_end_is_broken_for_a_slow_reader_too(workers, monkeypatch):
    workers.pump.update_polling(0.0)
    monkeypatch.setattr(Sink, "congested", True)
    written = LINE_BYTES
    while workers.waiting.must_wait:
        assert written < HELD_BYTES
        workers.long.feed(b"." * LINE_BYTES)
        written += LINE_BYTES
        workers.pump.update_polling(0.0)
    assert written == HELD_BYTES


def test_a_long_line_that_ends_in_time_is_whole_while_others_wait(workers):
    for start in (0.0, HELD_SECONDS):
        workers.pump.update_polling(start)
        assert workers.pump.deadline == start + STALL_SECONDS
        for part in (0.25, 0.5, 0.75):
            workers.write(b"." * 10, start + part * HELD_SECONDS)
            assert workers.waiting.must_wait
        workers.write(b"end\n", start + 0.9 * HELD_SECONDS)
        assert not workers.waiting.must_wait
        workers.begin_long_line()
    lines = workers.lines()
    assert [line[:2] for line in lines] == [b"0:", b"1:", b"0:", b"1:", b"0:"]
    assert all(line.endswith(b".end") for line in lines[0:4:2])
