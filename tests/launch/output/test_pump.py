"""Output that is left when all workers have ended is read, and none that others go on to write."""

import os
import select

import pytest

from cpulaunch.launch.output.pump import Pump
from cpulaunch.launch.output.sink import Sink
from cpulaunch.launch.output.streams import OutputRoute, Stream

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
