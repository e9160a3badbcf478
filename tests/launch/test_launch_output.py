"""The output of workers is complete, unmixed, prefixed and logged, and never delays a signal."""

import os
import pty
import signal
import socket
import subprocess
import sys
import time

import pytest

from cpulaunch.system.process_state import children_of
from tests import json_output
from tests.launch.launching import alive, eventually, python, shell

LINES = 20_000


def test_long_lines_of_two_workers_never_mix(launcher):
    code = """
        import sys
        for number in range(int(sys.argv[2])):
            print(sys.argv[1] * 200, number)
    """
    outcome = launcher.run(python(code, "a", str(LINES)), python(code, "b", str(LINES)))
    for index, letter in enumerate("ab"):
        mine = [line for line in outcome.lines if line.startswith(f"[{index}] ")]
        assert mine == [f"[{index}] {letter * 200} {number}" for number in range(LINES)]
    assert len(outcome.lines) == 2 * LINES


def test_stderr_goes_to_stderr(launcher):
    worker = shell("echo out; echo err >&2")
    outcome = launcher.run(worker, worker)
    assert sorted(outcome.lines) == ["[0] out", "[1] out"]
    assert sorted(outcome.error.splitlines()) == ["[0] err", "[1] err"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hundred_megabytes_arrive_whole(launcher, workers):
    code = """
        import os
        block = b"".join(b"%063d\\n" % number for number in range(16384))
        for _ in range(100):
            left = memoryview(block)
            while left:
                left = left[os.write(1, left):]
    """
    process = launcher.start(*[python(code)] * workers, show=[0] if workers == 1 else None)
    out, _ = process.communicate()
    expected = b"".join(b"%063d\n" % number for number in range(16384)) * 100
    for index in range(workers):
        prefix = b"[%d] " % index
        mine = (
            out
            if workers == 1
            else b"".join(
                line.removeprefix(prefix) for line in out.splitlines(keepends=True) if line.startswith(prefix)
            )
        )
        assert mine == expected


def test_a_line_too_long_for_memory_stays_in_one_piece(launcher):
    long_line = python("""
        import os
        for _ in range(20 * 16):
            os.write(1, b"x" * 65536)
        os.write(1, b"\\n")
    """)
    many = python("""
        for number in range(50_000):
            print("line", number)
    """)
    outcome = launcher.run(long_line, many)
    assert sorted(len(line) for line in outcome.lines)[-1] == 20 * 16 * 65536 + len("[0] ")
    assert [line for line in outcome.lines if line[:4] == "[1] "] == [f"[1] line {n}" for n in range(50_000)]


def test_a_worker_silent_in_mid_line_blocks_others_only_for_a_while(launcher, tmp_path):
    # Worker 1 ends only after writing more than all buffers hold; worker 0 waits for that in mid-line.
    holder = python("""
        import os, pathlib, time
        os.write(1, b"x" * (3 << 20))
        pathlib.Path("holding").write_text("1")
        while not pathlib.Path("written").exists():
            time.sleep(0.01)
        print("end")
    """)
    writer = python("""
        import pathlib, time
        while not pathlib.Path("holding").exists():
            time.sleep(0.01)
        for number in range(60_000):
            print("line", number, "." * 50)
        pathlib.Path("written").write_text("1")
    """)
    outcome = launcher.run(holder, writer)
    assert outcome.code == 0
    assert sum(line.startswith("[1] line ") for line in outcome.lines) == 60_000


def test_a_last_line_without_newline_is_shown(launcher):
    worker = shell("printf 'no newline'")
    assert sorted(launcher.run(worker, worker).lines) == ["[0] no newline", "[1] no newline"]


def test_one_visible_worker_is_passed_through_unchanged(launcher):
    worker = python("import os; os.write(1, b'a\\r\\nb\\0\\xff no newline')")
    assert launcher.run(worker, worker, show=[1]).out == b"a\r\nb\0\xff no newline"


def test_a_prompt_of_the_only_visible_worker_appears_at_once(launcher):
    process = launcher.start(python("import os, time; os.write(1, b'Continue? '); time.sleep(600)"), log_dir="logs")
    assert os.read(process.stdout.fileno(), 100) == b"Continue? "
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143


def test_a_progress_bar_among_several_workers_appears_while_it_runs(launcher):
    bar = python("""
        import os, time
        os.write(1, b"\\r 10%\\r 20%")
        time.sleep(600)
    """)
    process = launcher.start(bar, python("import time; time.sleep(600)"))
    seen = b""
    while b"10%" not in seen:
        seen += os.read(process.stdout.fileno(), 100)
    assert seen.startswith(b"[0] ")


def test_show_selects_the_workers_on_the_terminal(launcher):
    workers = [shell(f"echo out{index}; echo err{index} >&2") for index in range(3)]
    outcome = launcher.run(*workers, show=[0, 2])
    assert sorted(outcome.lines) == ["[0] out0", "[2] out2"]
    assert sorted(outcome.error.splitlines()) == ["[0] err0", "[2] err2"]


def test_a_hidden_worker_that_fails_is_still_quoted(launcher):
    outcome = launcher.run(shell("sleep 600"), shell("echo reason >&2; exit 3"), show=[0])
    assert outcome.code == 3
    assert outcome.error.endswith("  reason\n")


def test_logs_hold_each_workers_output_without_prefix(launcher, tmp_path):
    worker = shell("echo out; echo err >&2")
    outcome = launcher.run(worker, worker, log_dir="deep/logs")
    assert sorted(outcome.lines) == ["[0] out", "[1] out"]
    for index in (0, 1):
        logged = (tmp_path / "deep/logs" / f"worker-{index}.log").read_text()
        assert sorted(logged.splitlines()) == ["err", "out"]


@pytest.mark.parametrize("options", [{"show": []}, {"popen": {"stderr": subprocess.STDOUT}}], ids=["hidden", "merged"])
def test_logs_keep_the_order_of_stdout_and_stderr(launcher, tmp_path, options):
    worker = python("""
        import os
        for number in range(3000):
            os.write(1 + number % 2, b"%d\\n" % number)
    """)
    launcher.run(worker, log_dir="logs", **options)
    logged = (tmp_path / "logs/worker-0.log").read_text()
    assert logged.splitlines() == [str(number) for number in range(3000)]


def test_a_log_is_complete_when_the_launcher_is_killed(launcher, tmp_path):
    process = launcher.start(shell("printf 'no newline'; echo $$ > pid; exec sleep 600"), log_dir="logs")
    pid = launcher.pid("pid")
    process.kill()
    eventually(lambda: not alive(pid), "the end of the worker")
    eventually(lambda: (tmp_path / "logs/worker-0.log").read_text() == "no newline", "a complete log")


def test_a_log_is_appended_to(launcher, tmp_path):
    (tmp_path / "worker-0.log").write_text("from the last run\n")
    launcher.run(shell("echo new"), log_dir=".")
    assert (tmp_path / "worker-0.log").read_text() == "from the last run\nnew\n"


def test_sigusr1_opens_logs_again_and_reaches_only_workers_that_expect_it(launcher, tmp_path):
    unaware = shell("echo first; echo $$ > pid; until [ -e renamed ]; do sleep 0.01; done; echo second")
    aware = python("""
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print("told")))
        pathlib.Path("aware").write_text(str(os.getpid()))
        time.sleep(600)
    """)
    process = launcher.start(unaware, aware, log_dir="logs")
    launcher.pid("pid"), launcher.pid("aware")
    log = tmp_path / "logs/worker-0.log"
    eventually(lambda: log.read_text() == "first\n", "the first line")
    log.rename(tmp_path / "logs/worker-0.log.1")
    process.send_signal(signal.SIGUSR1)
    eventually(log.exists, "a new log")
    (tmp_path / "renamed").write_text("")
    assert process.wait() == 0
    assert log.read_text() == "second\n"
    assert (tmp_path / "logs/worker-0.log.1").read_text() == "first\n"
    assert (tmp_path / "logs/worker-1.log").read_text() == "told\n"


@pytest.mark.parametrize("taken", ["pipe", "device"])
def test_sigusr1_opens_nothing_else_than_files(launcher, tmp_path, taken):
    """A pipe, put there meanwhile, whose reader does not read would stop the worker that writes."""
    worker = shell("echo first; echo $$ > pid; until [ -e opened ]; do sleep 0.01; done; echo second")
    process = launcher.start(worker, shell("until [ -e opened ]; do sleep 0.01; done"), log_dir="logs")
    launcher.pid("pid")
    log, other = (tmp_path / f"logs/worker-{index}.log" for index in (0, 1))
    eventually(lambda: log.read_text() == "first\n", "the first line")
    log.rename(tmp_path / "logs/kept"), other.unlink()
    os.mkfifo(log) if taken == "pipe" else log.symlink_to("/dev/null")
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    process.send_signal(signal.SIGUSR1)
    eventually(other.exists, "a new log of the other worker")
    (tmp_path / "opened").write_text("")
    assert process.wait() == 0
    assert (tmp_path / "logs/kept").read_text() == "first\nsecond\n"
    assert os.read(reader, 100) == b""
    os.close(reader)


@pytest.mark.skipif(sys.platform != "linux", reason="names a process through prctl")
def test_a_worker_whose_name_is_no_text_gets_the_signal_that_it_expects(launcher, tmp_path):
    """The kernel cuts a name after 15 bytes, in the middle of a character, too."""
    named = python("""
        import ctypes, os, pathlib, signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print("told")))
        assert ctypes.CDLL(None).prctl(15, "fourteen bytes\u00e9".encode(), 0, 0, 0) == 0
        pathlib.Path("named").write_text(str(os.getpid()))
        time.sleep(600)
    """)
    process = launcher.start(named, log_dir="logs")
    launcher.pid("named")
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 0
    assert (tmp_path / "logs/worker-0.log").read_text() == "told\n"


def test_a_log_directory_that_is_a_file_starts_nothing(launcher, tmp_path):
    (tmp_path / "logs").write_text("")
    outcome = launcher.run(shell("touch started"), log_dir="logs/here")
    assert outcome.code == 125
    assert outcome.error == (
        "cpulaunch: error: log cannot be written: logs/here (Not a directory)\n"
        "hint: --log-dir needs a writable directory\n"
    )
    assert not (tmp_path / "started").exists()


def test_a_log_that_is_a_pipe_without_reader_starts_nothing(launcher, tmp_path):
    os.mkfifo(tmp_path / "worker-1.log")
    outcome = launcher.run(shell("touch started"), shell("touch started"), log_dir=".")
    assert outcome.code == 125
    assert outcome.error.startswith(
        "cpulaunch: error: log cannot be written: ./worker-1.log (No such device or address)\n"
    )
    assert not (tmp_path / "started").exists()


def test_logs_of_the_last_run_are_kept_if_one_cannot_be_opened(launcher, tmp_path):
    (tmp_path / "worker-0.log").write_text("from the last run\n")
    os.mkfifo(tmp_path / "worker-1.log")
    assert launcher.run(["/bin/true"], ["/bin/true"], log_dir=".").code == 125
    assert (tmp_path / "worker-0.log").read_text() == "from the last run\n"


def test_a_full_disk_ends_the_job_with_an_error(launcher, tmp_path):
    (tmp_path / "worker-1.log").symlink_to("/dev/full")
    late = shell("until [ -s pid ]; do sleep 0.01; done; echo text; exec sleep 600")
    outcome = launcher.run(shell("echo $$ > pid; exec sleep 600"), late, log_dir=".")
    assert outcome.code == 125
    assert outcome.error == (
        "cpulaunch: error: cannot write the workers' output; all workers were terminated: "
        "./worker-1.log (No space left on device)\n"
        "hint: free space there, or choose another --log-dir\n"
    )
    assert not alive(launcher.pid("pid"))


def test_a_full_disk_at_the_end_loses_no_output_that_has_another_place(launcher, tmp_path):
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    late = shell("trap '' TERM; echo > ready; until [ -s failed ]; do sleep 0.01; done; printf 'words of one'")
    outcome = launcher.run(
        shell("until [ -s ready ]; do sleep 0.01; done; printf words; echo > failed"), late, log_dir="."
    )
    assert outcome.code == 125
    assert sorted(outcome.lines) == ["[0] words", "[1] words of one"]
    assert (tmp_path / "worker-1.log").read_text() == "words of one"


def test_a_full_disk_leaves_a_report(launcher, tmp_path):
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    outcome = launcher.run(shell("echo text; exec sleep 600"), ["/bin/true"], log_dir=".", report="report.json")
    assert outcome.code == 125
    assert json_output.read("report", (tmp_path / "report.json").read_text())["exit_code"] == 125


def test_a_full_standard_output_is_a_failure_too(launcher):
    with open("/dev/full", "wb") as full:
        outcome = launcher.run(shell("echo text"), ["/bin/true"], popen={"stdout": full})
    assert outcome.code == 125
    assert "stdout (No space left on device)" in outcome.error


def test_writers_end_when_their_reader_leaves(launcher):
    process = launcher.start(["/usr/bin/yes"], ["/usr/bin/yes"])
    assert process.stdout.readline() in (b"[0] y\n", b"[1] y\n")
    process.stdout.close()
    assert process.wait() == 128 + signal.SIGPIPE


def test_logging_continues_when_the_reader_leaves(launcher, tmp_path):
    worker = python("""
        import pathlib, time
        print("first")
        while not pathlib.Path("closed").exists():
            time.sleep(0.01)
        for number in range(10_000):
            print(number)
    """)
    process = launcher.start(worker, log_dir="logs")
    process.stdout.readline()
    process.stdout.close()
    (tmp_path / "closed").write_text("")
    assert process.wait() == 0
    logged = (tmp_path / "logs/worker-0.log").read_text().splitlines()
    assert logged == ["first", *map(str, range(10_000))]


def test_signals_arrive_while_a_reader_does_not_read(launcher):
    process = launcher.start(["/usr/bin/yes"], ["/usr/bin/yes"])
    process.stdout.read(1)
    time.sleep(0.5)  # All buffers fill up; the assertion below does not depend on it.
    process.send_signal(signal.SIGTERM)
    eventually(lambda: not workers_of(process.pid), "the end of the workers")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143


def workers_of(pid):
    supervisors = [supervisor for inner in children_of(pid) for supervisor in children_of(inner)]
    return [worker for supervisor in supervisors for worker in children_of(supervisor)]


def test_a_launch_works_with_closed_standard_descriptors(launcher):
    closed = ["/bin/sh", "-c", 'exec "$@" <&- >&-', "sh"]
    outcome = launcher.run(shell("echo out; echo err >&2"), ["/bin/true"], prefix=closed)
    assert outcome.code == 0
    assert outcome.error == "[0] err\n"


def test_a_job_that_ignores_hangups_outlives_its_terminal(launcher, tmp_path):
    ours, theirs = pty.openpty()
    worker = python("""
        import pathlib, time
        print("first")
        while not pathlib.Path("closed").exists():
            time.sleep(0.01)
        print("second")
        pathlib.Path("survived").write_text("1")
    """)
    process = launcher.start(worker, worker, popen={"stdout": theirs, "stderr": theirs})
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    (tmp_path / "closed").write_text("")
    assert process.wait() == 0
    assert (tmp_path / "survived").exists()


def test_two_streams_of_one_terminal_keep_their_order(launcher):
    worker = python("""
        import os
        for number in range(2000):
            os.write(1 + number % 2, b"%d\\n" % number)
    """)
    outcome = launcher.run(worker, ["/bin/true"], popen={"stderr": subprocess.STDOUT})
    assert outcome.lines == [f"[0] {number}" for number in range(2000)]


def test_several_workers_read_nothing_and_one_reads_standard_input(launcher):
    for workers, expected in ((1, ["given"]), (2, [])):
        process = launcher.start(*[["/bin/cat"]] * workers, log_dir="logs", popen={"stdin": subprocess.PIPE})
        out, _ = process.communicate(b"given\n")
        assert out.decode().splitlines() == expected


def test_a_socket_is_written_without_blocking(launcher):
    # A socket cannot be opened a second time, so small writes when it polls writable must do.
    ours, theirs = socket.socketpair()
    process = launcher.start(["/usr/bin/yes"], ["/usr/bin/yes"], popen={"stdout": theirs.fileno()})
    theirs.close()
    first = b""
    while first.count(b"\n") < 100_000:
        first += ours.recv(1 << 16)
    assert set(first.splitlines()[:100_000]) <= {b"[0] y", b"[1] y"}
    process.send_signal(signal.SIGTERM)  # With the socket full, this must still arrive.
    eventually(lambda: not workers_of(process.pid), "the end of the workers")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    ours.close()


def test_hundreds_of_workers_raise_the_limit_on_open_files(launcher):
    worker = shell("ulimit -Sn")
    outcome = launcher.run(*[worker] * 40, prefix=["/bin/sh", "-c", 'ulimit -Sn 200; exec "$@"', "sh"])
    assert sorted(outcome.lines) == sorted(f"[{index}] 200" for index in range(40))


@pytest.mark.parametrize(("workers", "limit", "needed"), [(40, 200, 352), (2, 16, 48), (2, 10, 48)])
def test_too_low_a_hard_limit_on_open_files_is_an_error(launcher, workers, limit, needed):
    outcome = launcher.run(*[["/bin/true"]] * workers, prefix=["/bin/sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh"])
    assert outcome.code == 125
    assert outcome.error == (
        f"cpulaunch: error: too few open files allowed: {limit} ({workers} workers need {needed})\n"
        f"hint: ulimit -Hn {needed}\n"
    )


@pytest.mark.parametrize(
    ("stdin", "lines"), [("0", ["[0] text"]), ("1", ["[1] text"]), ("none", []), (None, []), ("all", ["text"])]
)
def test_standard_input_goes_where_it_is_asked_to(launcher, tmp_path, stdin, lines):
    (tmp_path / "input").write_text("text\n")
    with (tmp_path / "input").open() as file:
        outcome = launcher.run(["/bin/cat"], ["/bin/cat"], stdin=stdin, popen={"stdin": file})
    assert outcome.code == 0
    assert [line[-len(first) :] for line, first in zip(outcome.lines, lines, strict=True)] == lines
