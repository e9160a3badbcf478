"""The logs of ranks that torch's agent shows: as by torch's own code, and no wait for what a process puts there."""

import io
import os
import select
import threading
import time
from collections import Counter

import pytest

from cpulaunch.launch.hosts.agent import log_tail
from cpulaunch.launch.hosts.agent.log_tail import MAX_LINE, MAX_REST, MAX_TEXT, show_regular_logs, tail_log

WAIT_SECONDS = 60.0


def shown(file, *, tail=tail_log, during=None, output=None, **options):
    """What is shown of a log if its rank ends once `during` has returned."""
    output, finished = output or io.StringIO(), threading.Event()
    arguments = {"header": "[r0]:", "file": str(file), "dst": output, "finished": finished, "interval_sec": 0.01}
    thread = threading.Thread(target=tail, kwargs=arguments | options, daemon=True)
    thread.start()
    if during is not None:
        during(output)
    finished.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    output.seek(0)
    return output.read()


@pytest.mark.torch
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"one\ntwo\n\nno end",
        b"bar 1%\rbar 2%\r\nend\r",
        b"\xff\xfe caf\xc3\xa9 \xf0\x9f\x98\x80\0\n",
        b"a\x85b\xe2\x80\xa8c\x0cd\n",
        b"x" * 20_000 + b"\ny\n" * 9_000,
        b"12345\n" * 60_000 + b"z" * 90_000 + b"\n12345",
    ],
)
@pytest.mark.parametrize("wanted", [lambda line: True, lambda line: "o" in line], ids=["all", "some"])
def test_a_log_is_shown_as_by_torch(tmp_path, content, wanted):
    from torch.distributed.elastic.multiprocessing import tail_log as torchs

    log = tmp_path / "stdout.log"
    log.write_bytes(content)
    expected = shown(log, tail=torchs.tail_logfile, log_line_filter=wanted)
    assert shown(log, log_line_filter=wanted) == expected
    assert bool(content) == bool(expected) or "o" not in content.decode(errors="replace")


@pytest.mark.torch
def test_torchs_agent_shows_logs_in_this_way(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing import tail_log as torchs

    monkeypatch.setattr(torchs, "tail_logfile", None)
    stdout, output, file = io.StringIO(), io.StringIO(), io.StringIO()
    show_regular_logs({stdout: output})
    (tmp_path / "stdout.log").write_text("one\n")
    for own in (stdout, file):
        torchs.TailLog("worker", {0: str(tmp_path / "stdout.log")}, own).start().stop()
    assert [each.getvalue() for each in (stdout, output, file)] == ["", "[worker0]:one\n", "[worker0]:one\n"]


def test_lines_that_a_rank_writes_meanwhile_are_shown_at_once(tmp_path):
    def write(output):
        time.sleep(0.05)  # The log is not there yet.
        with open(tmp_path / "stdout.log", "w", buffering=1) as log:
            for number in range(3):
                log.write(f"{number}\n")
                deadline = time.monotonic() + WAIT_SECONDS
                while f"[r0]:{number}\n" not in output.getvalue() and time.monotonic() < deadline:
                    time.sleep(0.01)  # Until the thread has read it.
                seen.append(output.getvalue())

    seen = []
    last = shown(tmp_path / "stdout.log", during=write)
    assert [len(each.splitlines()) for each in seen] == [1, 2, 3]
    assert last == "[r0]:0\n[r0]:1\n[r0]:2\n"


def test_a_log_to_which_a_process_goes_on_writing_ends_where_it_was_when_the_rank_ended(tmp_path):
    class Endless(io.StringIO):
        """An output after each of whose lines the log has another one."""

        def write(self, text):
            log.write("\n")
            return super().write(text)

    finished = threading.Event()
    finished.set()
    with open(tmp_path / "stdout.log", "w", buffering=1) as log:
        log.write("\n\n\n")
        output = Endless()
        tail_log("[r0]:", log.name, output, finished, 0.01)
    assert output.getvalue() == "[r0]:\n" * 3


def test_of_a_log_of_any_size_the_rest_after_the_rank_has_ended_has_a_limit(tmp_path, monkeypatch):
    """It may be a file without blocks."""

    class Counting(io.StringIO):
        longest = count = 0

        def write(self, text):
            self.longest, self.count = max(self.longest, len(text)), self.count + text.count("\0")
            return super().write(text.replace("\0", ""))

    finished = threading.Event()
    finished.set()
    (tmp_path / "stdout.log").touch()
    os.truncate(tmp_path / "stdout.log", MAX_REST + 5)
    output = Counting()
    tail_log("", str(tmp_path / "stdout.log"), output, finished, 0.01)
    assert (output.longest, output.count) == (MAX_TEXT + MAX_LINE, MAX_REST)
    assert output.getvalue() == "\ncpulaunch: 5 more bytes are only in the log\n"


@pytest.mark.parametrize("blocking", [True, False])
def test_lines_of_several_logs_are_whole_also_where_their_reader_is_slow(tmp_path, blocking):
    """The pipe is full, and takes a part of what is written, at once if another process made it non-blocking."""
    read, write = os.pipe()
    os.set_blocking(write, blocking)
    output = io.TextIOWrapper(io.FileIO(write, "w"), write_through=True)
    finished, threads = threading.Event(), []
    finished.set()
    for rank in "ab":
        (tmp_path / rank).write_text(f"{rank * 99}\n" * (1 << 12))
        threads.append(
            threading.Thread(target=tail_log, args=(f"{rank}:", str(tmp_path / rank), output, finished, 0.01))
        )
        threads[-1].start()
    left, data = 2 * (1 << 12) * 102, b""
    while len(data) < left and select.select([read], [], [], WAIT_SECONDS)[0]:
        data += os.read(read, 1000)
    for thread in threads:
        thread.join(WAIT_SECONDS)
    output.close()
    os.close(read)
    assert Counter(data.splitlines()) == {b"a:" + b"a" * 99: 1 << 12, b"b:" + b"b" * 99: 1 << 12}


def test_what_a_buffered_output_holds_stays_there_while_lines_wait_for_room(tmp_path):
    """Written when nothing more fits, it would be lost."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    while select.select([], [write], [], 0)[1]:
        os.write(write, b"x" * 4096)
    output = io.TextIOWrapper(io.BufferedWriter(io.FileIO(write, "w"), 100))
    output.buffer.write(b"b" * 100)
    output.write("printed\n")
    (tmp_path / "stdout.log").write_text("line\n")
    finished = threading.Event()
    finished.set()
    thread = threading.Thread(target=tail_log, args=("", str(tmp_path / "stdout.log"), output, finished, 0.01))
    thread.start()
    data = b""
    while b"line\n" not in data and select.select([read], [], [], WAIT_SECONDS)[0]:
        data += os.read(read, 1000)
    thread.join(WAIT_SECONDS)
    output.close()
    assert os.read(read, 1000) == b"b" * 100 + b"printed\n"
    os.close(read)


def test_a_pipe_in_place_of_a_log_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "stdout.log")
    with pytest.raises(OSError, match="not a regular file"):
        tail_log("", str(tmp_path / "stdout.log"), io.StringIO(), threading.Event(), 0.01)


@pytest.mark.parametrize("log", [os.devnull, "missing"])
def test_a_rank_without_a_log_has_nothing_to_show(tmp_path, log):
    assert shown(tmp_path / log) == ""


def test_a_log_on_which_a_process_has_a_lease_is_shown_once_it_lets_go(tmp_path, monkeypatch):
    (tmp_path / "stdout.log").write_text("one\n")
    refusals = [BlockingIOError(), BlockingIOError()]
    open_regular = log_tail.open_regular

    def leased(file, **options):
        if refusals:
            raise refusals.pop()
        return open_regular(file, **options)

    monkeypatch.setattr(log_tail, "open_regular", leased)

    def wait(output):
        deadline = time.monotonic() + WAIT_SECONDS
        while not output.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)  # Until the thread has read it.

    assert shown(tmp_path / "stdout.log", during=wait) == "[r0]:one\n"


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path):
    (tmp_path / "stdout.log").write_text("café\nend\n")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert shown(tmp_path / "stdout.log", output=terminal) == "[r0]:caf\\xe9\n[r0]:end\n"
