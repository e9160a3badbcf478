"""Ranks are restarted together, and only where that is meant; a lost port is not a failure of theirs."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import free_port, text_of

from cpulaunch.launch.process.spawn import Inherited
from cpulaunch.launch.ranks import engine
from cpulaunch.launch.ranks.engine import end_requested
from cpulaunch.launch.supervision.options import SupervisorOptions
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.records.errors import LEAVE_FOLDERS, LaunchError
from cpulaunch.records.record import replace
from cpulaunch.system.libc import is_linux, private_pipe
from cpulaunch.system.signals import ENDING
from tests.launch.launching import alive, eventually, sleeps
from tests.launch.test_launch_signals import Terminal, parent, stopped

TWO = ("--nproc-per-node", "2")


def test_every_attempt_is_a_new_group_with_a_port_of_its_own(launch):
    job = launch.run(*TWO, "--max-restarts", "2", "--log-dir", "logs", "seen.py", "fail=1:3:2")
    assert job.code == 0, job.err
    assert sorted(job.seen) == [(attempt, rank) for attempt in range(3) for rank in range(2)]
    variables = [
        {name: job.seen[attempt, rank]["env"][name] for name in PER_ATTEMPT} for attempt, rank in sorted(job.seen)
    ]
    assert len({each["MASTER_PORT"] for each in variables}) == 3
    assert len({each["TORCHELASTIC_ERROR_FILE"] for each in variables}) == 6
    assert len({each["TORCHELASTIC_RUN_ID"] for each in variables}) == 1
    assert [line for line in job.err.splitlines() if "restarting" in line] == [
        "cpulaunch: rank 1 failed (exit code 3): restarting all 2 ranks, attempt 2 of 3",
        "cpulaunch: rank 1 failed (exit code 3): restarting all 2 ranks, attempt 3 of 3",
    ]


PER_ATTEMPT = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")


@pytest.mark.parametrize(
    "make", ["open(path, 'w').close()", "os.mkfifo(path)", "os.symlink('/', path)", "os.mkdir(path)"]
)
@pytest.mark.parametrize("logs", [(), ("--log-dir", "logs", "-t", "3")], ids=["private", "kept"])
def test_what_a_rank_puts_in_place_of_the_next_attempts_folder_is_replaced(launch, make, logs):
    launch.write(f"""
        path = os.environ["TORCHELASTIC_ERROR_FILE"].partition("attempt_0")[0] + "attempt_1"
        if attempt == 0:
            {make}
            sys.exit(3)
    """)
    job = launch.run("--nproc-per-node", "1", "--max-restarts", "1", *logs, "job.py")
    assert job.code == 0, job.err


def test_a_rank_that_removes_the_jobs_folder_is_told_to_leave_it(launch):
    launch.write("""
        import shutil
        shutil.rmtree(os.environ["TORCHELASTIC_ERROR_FILE"].partition("/attempt_0")[0])
        sys.exit(3)
    """)
    job = launch.run("--nproc-per-node", "1", "--max-restarts", "1", "job.py")
    assert job.code == 125
    assert LEAVE_FOLDERS in job.err


@pytest.fixture
def full(launch):
    """Runs a job whose ranks fill TMPDIR, a file system of this size, in the first attempt, and then run the lines."""

    def run(lines, size, *options, **environ):
        launch.write(
            """
            if attempt == 0:
                say(f"place.{rank}", os.environ["TORCHELASTIC_ERROR_FILE"])
                wait_for(f"place.{1 - rank}")
                number = 0
                try:
                    while True:
                        with open(os.environ["TMPDIR"] + f"/{rank}-{number}", "xb", buffering=0) as file:
                            file.write(bytes(4096))
                        number += 1
                except OSError:
                    sys.exit(3)
            """
            + lines
        )
        (launch.folder / "small").mkdir()
        small = f'mount -t tmpfs -o {size} tmpfs small && exec "$@"'
        command = [sys.executable, "-m", "cpulaunch", *TWO, "--max-restarts", "1", *options, "job.py"]
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", small, "sh", *command],
            cwd=launch.folder,
            env={**os.environ, "TMPDIR": str(launch.folder / "small"), **environ},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


mounts = pytest.mark.skipif(not is_linux() or os.geteuid() != 0, reason="mounting a small disk needs root")
SAYS_WHERE = 'say(f"later.{rank}", os.environ["TORCHELASTIC_ERROR_FILE"])'


@pytest.mark.root
@mounts
@pytest.mark.parametrize("options", [(), ("--report", "report.json"), ("--log-dir", "logs", "--start-barrier")])
@pytest.mark.parametrize("size", ["nr_inodes=200", "size=256k"])
def test_ranks_are_restarted_where_tmpdir_has_become_full(launch, full, options, size):
    done = full(SAYS_WHERE, size, *options)
    assert done.returncode == 0, done.stderr
    place = Path(text_of(launch.folder / "later.1"))
    if "--log-dir" in options:
        assert place.parent.parent.parent.parent == launch.folder / "logs"
    else:
        assert not place.is_relative_to(launch.folder)
        assert not place.parent.parent.parent.exists()


@pytest.mark.root
@mounts
def test_the_launchs_error_file_has_the_exception_of_ranks_that_were_restarted_elsewhere(launch, full):
    error = launch.folder / "error.json"
    record = """
            say(f"later.{rank}", os.environ["TORCHELASTIC_ERROR_FILE"])
            import json
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                json.dump({"message": "a failure elsewhere"}, file)
            sys.exit(5)
    """
    done = full(record, "nr_inodes=200", TORCHELASTIC_ERROR_FILE=str(error))
    assert done.returncode == 5, done.stderr
    assert "a failure elsewhere" in error.read_text()
    [place, *_] = launch.folder.glob("later.*")  # The other rank may have been ended before.
    assert not Path(text_of(place)).parent.parent.parent.exists()


def test_attempts_run_out(launch):
    job = launch.run(*TWO, "--max-restarts", "1", "seen.py", "fail=0:3:9")
    assert job.code == 3
    assert sorted({attempt for attempt, _ in job.seen}) == [0, 1]
    assert "(attempt 2 of 2)" in job.err


def test_many_attempts_leave_no_descriptors(launch):
    process = launch.start("--nproc-per-node", "2", "--max-restarts", "150", "--no-python", "/bin/false")
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (64, 64))
    job = launch.finish(process)
    assert (job.code, job.err.count("restarting")) == (1, 150)
    assert not list((launch.folder / "tmp").iterdir())


def test_an_attempt_that_cannot_begin_leaves_no_descriptors(monkeypatch):
    def fails(*arguments):
        raise LaunchError("no space left")

    closed = []
    plan = SimpleNamespace(launch=SimpleNamespace(watched=True))
    run = SimpleNamespace(plan=plan, specs=(), private="private", folder=None, run_id="run")
    monkeypatch.setattr(engine, "make_rank_files", lambda *_, **__: SimpleNamespace(close=lambda: closed.append(1)))
    monkeypatch.setattr(engine, "make_events_directory", fails)
    with pytest.raises(LaunchError):
        engine._run_attempt(run, None, port=1, restarts=0)
    assert closed == [1]


def test_many_watched_attempts_leave_no_descriptors(launch):
    watched = ("--metric", "x: (.*)", "--start-barrier", "--report", "r.json", "-t", "3", "--log-dir", "logs")
    process = launch.start(*TWO, "--max-restarts", "30", *watched, "--no-python", "/bin/false")
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (64, 64))
    job = launch.finish(process)
    assert (job.code, job.err.count("restarting")) == (1, 30)
    assert (launch.folder / "r.json").exists()
    assert not list((launch.folder / "tmp").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_never_restarts(launch, number):
    launch.write('say(f"here.{rank}.{attempt}", os.getpid()); signal.pause()')
    process = launch.start(*TWO, "--max-restarts", "5", "job.py")
    for rank in range(2):
        text_of(launch.folder / f"here.{rank}.0")
    process.send_signal(number)
    job = launch.finish(process)
    assert job.code == 128 + number
    assert "restarting" not in job.err


def test_a_signal_after_a_failure_forbids_a_restart(launch):
    # Rank 0 takes its time to end when rank 1 has failed; then SIGTERM ends the job.
    launch.write("""
        if rank == 1:
            wait_for("ready")
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: say("signalled", "1"))
        say("ready", "1")
        while True:
            signal.pause()
    """)
    process = launch.start(*TWO, "--max-restarts", "5", "--shutdown-timeout", "600", "job.py")
    text_of(launch.folder / "signalled")
    process.send_signal(signal.SIGINT)
    job = launch.finish(process)
    assert job.code == 3
    assert "restarting" not in job.err


def test_ctrl_c_ends_a_job_whatever_signals_were_chosen(launch):
    launch.write('say(f"here.{rank}.{attempt}", os.getpid()); signal.pause()')
    process = launch.start(*TWO, "--max-restarts", "5", "--signals-to-handle", "SIGUSR1", "job.py")
    for rank in range(2):
        text_of(launch.folder / f"here.{rank}.0")
    process.send_signal(signal.SIGINT)
    job = launch.finish(process)
    assert job.code == 130
    assert "restarting" not in job.err


def test_a_signal_that_is_passed_on_forbids_a_restart_if_it_usually_ends_jobs(launch):
    launch.write('say(f"here.{rank}.{attempt}", os.getpid()); signal.pause()')
    process = launch.start(*TWO, "--max-restarts", "5", "--signals-to-handle", "SIGUSR1", "job.py")
    for rank in range(2):
        text_of(launch.folder / f"here.{rank}.0")
    process.send_signal(signal.SIGTERM)
    job = launch.finish(process)
    assert job.code == 143
    assert "restarting" not in job.err


@pytest.mark.parametrize(
    ("ending", "number", "asked"),
    [
        (ENDING, signal.SIGTERM, True),
        (ENDING, signal.SIGUSR1, False),
        ({signal.SIGUSR1}, signal.SIGUSR1, True),
        ({signal.SIGUSR1}, signal.SIGTERM, True),
        ({signal.SIGUSR1}, signal.SIGUSR2, False),
        (ENDING, None, False),
    ],
)
def test_a_signal_between_two_attempts_counts(ending, number, asked):
    """And the guard asks no longer, which it would do until reports are written."""
    read, write = private_pipe()
    os.set_blocking(write, False)
    inherited = Inherited(signal_mask=frozenset())
    options = SupervisorOptions(inherited=inherited, grace_seconds=1, control=read, ending_signals=frozenset(ending))
    try:
        if number is not None:
            os.write(write, bytes([number]))
        assert end_requested(LaunchResult(exit_code=3, host="h", workers=()), options) == asked
        if is_linux():
            assert has_ended(write) == asked
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    ("paused", "numbers", "later", "asked"),
    [
        (True, b"", signal.SIGCONT, False),
        (True, b"", signal.SIGTERM, True),
        (False, bytes([signal.SIGTSTP]), signal.SIGCONT, False),
        (False, bytes([signal.SIGCONT, signal.SIGTSTP, signal.SIGUSR1]), signal.SIGINT, True),
        (True, b"", None, True),
    ],
)
def test_a_stopped_launch_waits_between_two_attempts(paused, numbers, later, asked):
    read, write = private_pipe()
    options = SupervisorOptions(inherited=Inherited(signal_mask=frozenset()), grace_seconds=1, control=read)
    result = LaunchResult(exit_code=3, host="h", workers=(), paused=paused)
    found = []
    waiting = threading.Thread(target=lambda: found.append(end_requested(result, options)))
    os.write(write, numbers)
    waiting.start()
    waiting.join(0.2)
    assert not found
    if later is None:
        os.close(write)
    else:
        os.write(write, bytes([later]))
    waiting.join()
    os.close(read)
    if later is not None:
        os.close(write)
    assert found == [asked]


def test_a_signal_between_two_attempts_that_another_process_reads_does_not_count(monkeypatch):
    read, write = private_pipe()
    os.set_blocking(read, False)
    options = SupervisorOptions(inherited=Inherited(signal_mask=frozenset()), grace_seconds=1, control=read)
    os.write(write, bytes([signal.SIGTERM]))
    take = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: (take(fd, size), take(fd, size))[1])
    assert not end_requested(LaunchResult(exit_code=3, host="h", workers=()), options)
    monkeypatch.undo()
    os.close(read)
    os.close(write)


def failed_attempt(*, inside_line):
    rank = WorkerResult(index=0, pid=1, exit_code=3, signal=None, rank=0)
    return LaunchResult(exit_code=3, host="h", workers=(rank,), first_failure=0, inside_line=inside_line)


def attempted(results, monkeypatch, *, lost_port=None, written=True, **job):
    """The last one of these results as the engine returns it, and what it said."""
    monkeypatch.setattr(engine, "_run_attempt", lambda *args, **options: results.pop(0))
    monkeypatch.setattr(engine, "_lost_port", lambda *args: lost_port)
    monkeypatch.setattr(engine, "PortReservation", lambda port: nullcontext(SimpleNamespace(port=port)))
    said, (read, write) = [], private_pipe()
    run = SimpleNamespace(
        plan=SimpleNamespace(launch=SimpleNamespace(grace_seconds=1)),
        job=SimpleNamespace(signals=(), **job),
        private=None,
        memory_events=None,
        notify=lambda text: said.append(text) or written,
        on_started=None,
    )
    link = SimpleNamespace(inherited=None, control=read, guards=(), cgroup=None, adopts_orphans=False)
    result, _ = engine._run_attempts(run, link, [])
    os.close(read)
    os.close(write)
    return result, said


@pytest.mark.parametrize(("inside_line", "lead"), [(True, "\n"), (False, "")])
def test_a_restart_is_said_on_a_new_line(inside_line, lead, monkeypatch):
    failed = failed_attempt(inside_line=inside_line)
    results = [failed, replace(failed, exit_code=0, first_failure=None)]
    _, said = attempted(results, monkeypatch, max_restarts=1, master_port=None)
    assert said == [f"{lead}rank 0 failed (exit code 3): restarting it, attempt 2 of 2"]


@pytest.mark.parametrize("written", [False, True])
def test_a_lost_port_is_said_on_a_new_line_and_the_summary_follows_it(written, monkeypatch):
    """Without an empty line in between."""
    results = [failed_attempt(inside_line=True)]
    job = {"max_restarts": 0, "master_port": 29500}
    result, said = attempted(results, monkeypatch, lost_port="port 29500 was taken", written=written, **job)
    assert said == ["\nport 29500 was taken"]
    assert result.inside_line == (not written)


LEAVING = """
    if attempt == 0:
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("left", os.getpid())
            wait_for("let-go")
            os._exit(0)
        wait_for("left")
        say("pids", f"{os.getpid()} {os.getppid()}")
        sys.exit(3)
    say("again", attempt)
"""


@pytest.mark.skipif(not is_linux(), reason="elsewhere there is one guard, and no wait for what ranks leave")
def test_ctrl_z_while_an_attempt_ends_delays_the_next_one(launch):
    launch.write(LEAVING)
    terminal = Terminal(SimpleNamespace(dir=launch.folder))
    options = "--nproc-per-node 1 --max-restarts 1 --shutdown-timeout 600"
    terminal.type(f"{sys.executable} -m cpulaunch {options} job.py\n")
    try:
        rank, supervisor = map(int, text_of(launch.folder / "pids").split())
        guard = parent(parent(supervisor))
        eventually(lambda: not alive(rank), "the end of the rank")
        terminal.type("\x1a")
        eventually(lambda: stopped(guard), "the stop of the launcher")
        (launch.folder / "let-go").touch()
        eventually(lambda: sleeps(supervisor), "two seconds in which no attempt begins")
        assert not (launch.folder / "again").exists()
        terminal.type("fg; echo $? > code\n")
        assert text_of(launch.folder / "code").strip() == "0"
        assert text_of(launch.folder / "again") == "1"
    finally:
        terminal.close()


def has_ended(fd):
    """Whether nothing more will come from the other end of a socket."""
    try:
        return os.read(fd, 1) == b""
    except BlockingIOError:
        return False


def test_chosen_signals_end_the_job(launch):
    launch.write("""
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
        say(f"here.{rank}", "1")
        signal.pause()
    """)
    process = launch.start(*TWO, "--signals-to-handle", "SIGUSR1", "job.py")
    for rank in range(2):
        text_of(launch.folder / f"here.{rank}")
    process.send_signal(signal.SIGUSR1)
    assert launch.finish(process).code == 128 + signal.SIGUSR1


SERVING = """
    with socket.socket() as server:
        if rank == 0:
            port = int(os.environ["MASTER_PORT"])
            count = len([name for name in os.listdir() if name.startswith("port.")])
            say(f"port.{count}", port)
            wait_for(f"go.{count}")
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", port))
                server.listen()
            except OSError as error:
                sys.exit(f"port {port}: {error}")
        say(f"done.{rank}.{attempt}", "1")
"""


class Impostor:
    """Listens on the ports of a job before its rank 0 does."""

    def __init__(self, folder):
        self.folder = folder
        self.taken = []

    def take(self, count, *, really=True, host=""):
        port = int(text_of(self.folder / f"port.{count}"))
        server = socket.socket()
        self.taken.append(server)
        if really:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, port))
            server.listen()
        (self.folder / f"go.{count}").touch()
        return port

    def close(self):
        for server in self.taken:
            server.close()


@pytest.fixture
def impostor(launch):
    made = Impostor(launch.folder)
    yield made
    made.close()


def test_a_lost_port_is_replaced_without_counting_a_restart(launch, impostor):
    launch.write(SERVING)
    process = launch.start(*TWO, "job.py")
    lost = [impostor.take(0), impostor.take(1)]
    kept = impostor.take(2, really=False)
    job = launch.finish(process)
    assert job.code == 0, job.err
    assert len({*lost, kept}) == 3
    assert (launch.folder / "done.0.0").exists()
    lines = [line for line in job.err.splitlines() if "was taken by" in line]
    assert [str(port) in line for port, line in zip(lost, lines, strict=True)] == [True, True]
    assert "(pid " in lines[0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs two addresses of loopback")
def test_a_listener_beside_rank_0_restarts_no_job_that_fails_for_another_reason(launch, impostor):
    """Any user of the host may listen at another address of the same port, and at a port of the program's own too."""
    launch.write("""
        if rank == 0:
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
                server.listen()
                say(f"port.{int(os.path.exists('port.0'))}", os.environ["MASTER_PORT"])
                wait_for("go.0")
            print("port 80: Address already in use", file=sys.stderr)
            sys.exit(3)
        signal.pause()
    """)
    process = launch.start(*TWO, "job.py")
    impostor.take(0, host="127.0.0.2")
    job = launch.finish(process)
    assert job.code == 3, job.err
    assert "was taken by" not in job.err
    assert not (launch.folder / "port.1").exists()


def test_the_number_of_replaced_ports_is_limited(launch, impostor):
    launch.write(SERVING)
    process = launch.start(*TWO, "job.py")
    for count in range(4):
        impostor.take(count)
    job = launch.finish(process)
    assert job.code == 1
    assert job.err.count("of the ranks was taken by") == 4
    assert "Address already in use" in job.err


def test_a_chosen_port_is_not_replaced(launch, impostor):
    launch.write(SERVING)
    process = launch.start(*TWO, "--master-port", free_port(), "job.py")
    impostor.take(0)
    job = launch.finish(process)
    assert job.code == 1
    assert job.err.count("of the ranks was taken by") == 1


def test_a_port_in_use_is_an_error_before_any_rank_starts(launch):
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        job = launch.run(*TWO, "--master-port", str(port), "--log-dir", "logs", "seen.py")
    assert job.code == 125
    assert job.err.splitlines()[-2].startswith("cpulaunch: error: the master port is already in use by ")
    assert job.err.splitlines()[-2].endswith(f": {port} (--master-port)")
    assert not job.seen
    assert not job.files


def test_a_failure_is_no_lost_port_without_a_listener(launch):
    job = launch.run(*TWO, "seen.py", "fail=0:1:9")
    assert job.code == 1
    assert "was taken by" not in job.err
