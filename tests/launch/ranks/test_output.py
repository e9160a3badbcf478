"""Where ranks' output goes: whole lines, files, and what happens when a disk is full."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from jobs import alive, text_of

from cpulaunch.launch.output.sink import Sink
from cpulaunch.launch.output.streams import LINE_BYTES, OutputRoute
from cpulaunch.launch.ranks.files import RankFiles, RunFolder, make_rank_files
from cpulaunch.launch.ranks.output import FilteredRoute, open_rank_routing
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import StreamsPlan
from tests import json_output

FDS = "/proc/self/fd"
TWO = ("--nproc-per-node", "2")


def test_lines_of_several_ranks_are_whole_and_have_no_prefix(launch):
    launch.write("""
        for _ in range(200):
            sys.stdout.write("a" * 20)
            sys.stdout.flush()
            print("b" * 20, flush=True)
    """)
    job = launch.run(*TWO, "job.py")
    assert job.out == ["a" * 20 + "b" * 20] * 400


def test_a_log_directory_alone_shows_and_writes(launch):
    job = launch.run(*TWO, "--log-dir", "logs", "seen.py")
    assert job.out == [f"[default{rank}]:out of {rank}, attempt 0" for rank in range(2)]
    assert {name.partition("/")[2]: lines for name, lines in job.files.items()} == {
        f"attempt_0/{rank}/std{stream}.log": [f"{stream} of {rank}, attempt 0"]
        for rank in range(2)
        for stream in ("out", "err")
    }


def test_lines_begin_with_what_the_template_says(launch):
    """It has been an option of torchrun's since torch 2.15, where it wins over the variable."""
    template = ("--log-line-prefix-template", "${hostname} $rank/${role_name}$$: ")
    job = launch.run(*TWO, "-t", "1", *template, "seen.py", env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "not this: "})
    assert job.out == [f"{os.uname().nodename} {rank}/default$: out of {rank}, attempt 0" for rank in range(2)]


def test_logs_without_a_directory_are_kept_and_found(launch):
    job = launch.run(*TWO, "-r", "1", "seen.py")
    (folder,) = (launch.folder / "tmp").iterdir()
    assert f"cpulaunch: logs: {folder}" in job.err.splitlines()
    assert (folder / "attempt_0" / "1" / "stdout.log").read_text() == "out of 1, attempt 0\n"
    assert not job.out


def test_a_quiet_job_says_nothing_of_its_logs(launch):
    job = launch.run("-q", *TWO, "-r", "1", "seen.py")
    assert (job.code, [line for line in job.err.splitlines() if line.startswith("cpulaunch:")]) == (0, [])


def test_nothing_is_left_without_logs(launch):
    assert launch.run(*TWO, "seen.py").code == 0
    assert not list((launch.folder / "tmp").iterdir())


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_rank_with_logs_runs_where_standard_descriptors_are_closed(launch, closed):
    """The folder of the logs, which the launcher keeps open, has none of their numbers."""
    launch.write("print('read:', repr(sys.stdin.read()))")
    command = [sys.executable, "-m", "cpulaunch", "--nproc-per-node", "1", "--log-dir", "logs", "job.py"]
    shell = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *command]
    subprocess.run(shell, cwd=launch.folder, stdin=subprocess.DEVNULL, check=True)
    (log,) = (launch.folder / "logs").glob("*/attempt_0/0/stdout.log")
    assert log.read_text() == "read: ''\n"


def test_some_ranks_are_shown(launch):
    job = launch.run("--nproc-per-node", "3", "--cpus", "0", "--show", "0,2", "seen.py")
    assert job.out == ["out of 0, attempt 0", "out of 2, attempt 0"]


def test_a_hidden_rank_that_fails_is_quoted(launch):
    job = launch.run(*TWO, "--local-ranks-filter", "0", "seen.py", "fail=1:3:1")
    assert "  err of 1, attempt 0" in job.err.splitlines()


def test_figures_reports_and_barriers_work_with_ranks(launch):
    launch.write("""
        import cpulaunch
        cpulaunch.ready()
        say(f"released.{rank}", "1")
        print(f"speed: {rank + 1}")
    """)
    job = launch.run(*TWO, "--metric", r"speed: (\d+)", "--report", "r.json", "--start-barrier", "job.py")
    assert job.code == 0, job.err
    assert "cpulaunch: speed: 3 (1 + 2)" in job.err.splitlines()
    report = json_output.read("report", (launch.folder / "r.json").read_text())
    assert [(worker["rank"], worker["exit_code"]) for worker in report["workers"]] == [(0, 0), (1, 0)]
    assert report["attempts"] == 1
    assert not list((launch.folder / "tmp").iterdir())


def test_a_report_is_of_the_last_attempt(launch):
    metric = ("--metric", r"attempt (\d+)", "--report", "r.json")
    job = launch.run(*TWO, *metric, "--max-restarts", "3", "seen.py", "fail=1:3:2")
    report = json_output.read("report", (launch.folder / "r.json").read_text())
    assert (job.code, report["attempts"]) == (0, 3)
    assert report["metrics"]["attempt"] == {"sum": 4.0, "values": [2.0, 2.0]}


def test_a_log_directory_that_is_a_file_is_an_error(launch):
    (launch.folder / "taken").write_text("")
    job = launch.run(*TWO, "--log-dir", "taken", "seen.py")
    assert job.code == 125
    assert job.err.splitlines()[-2] == "cpulaunch: error: log cannot be written: taken (File exists)"
    assert not job.seen


@pytest.mark.root
def test_error_files_of_ranks_alone_are_copied(tmp_path):
    """A rank may leave any number of other files in their folder, which other ranks share."""
    folder = RunFolder(path=str(tmp_path), kept=True, fd=os.open(tmp_path, os.O_RDONLY), secure=False)
    (tmp_path / "private").mkdir()
    files = make_rank_files(folder, restarts=0, ranks=2, private=str(tmp_path / "private"))
    for name in ("0", "1", "2", "..", ""):
        with open(os.path.join(files.errors, f"error-{name}.json"), "w") as file:
            file.write(name)
    files.close()
    copies = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("error.json")}
    assert copies == {"attempt_0/0/error.json": "0", "attempt_0/1/error.json": "1"}
    os.close(folder.fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_ends_the_job(launch):
    launch.write("""
        say(f"rank.{rank}", os.getpid())
        wait_for(f"rank.{1 - rank}")
        if rank == 1:
            sys.stdout.write("x" * (1 << 20))
            sys.stdout.flush()
        time.sleep(600)
    """)
    (launch.folder / "logs").mkdir()
    small = 'mount -t tmpfs -o size=64k tmpfs logs && exec "$@"'
    command = [sys.executable, "-m", "cpulaunch", *TWO, "--max-restarts", "3", "--log-dir", "logs", "-r", "3", "job.py"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", small, "sh", *command],
        cwd=launch.folder,
        env={**os.environ, "TMPDIR": str(launch.folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 125, done.stderr
    assert "stdout.log (No space left on device)" in done.stderr
    assert "hint: free space there" in done.stderr
    assert not any(alive(int(text_of(launch.folder / f"rank.{rank}"))) for rank in range(2))


FILTERED = {
    "matching lines": ([b"an apple\na pear\nan ", b"apple again\n"], b"0: an apple\n0: an apple again\n"),
    "any word": ([b"plum\npear\nfig\n"], b"0: plum\n0: fig\n"),
    "an unfinished line": ([b"pear\nplum"], b"0: plum\n"),
    "none": ([b"pear\n"], b""),
    "a line longer than memory": ([b"x" * LINE_BYTES, b"\n", b"fig\n"], b"0: fig\n"),
    "a long line that begins with a word": (
        [b"fig" + b"x" * LINE_BYTES, b"y\npear\nplum\n"],
        b"0: fig" + b"x" * LINE_BYTES + b"y\n0: plum\n",
    ),
    "a long line that ends with a word": ([b"x" * LINE_BYTES, b"fig\n"], b"0: fig\n"),
    "a long line without an end": ([b"fig" + b"x" * LINE_BYTES], b"0: fig" + b"x" * LINE_BYTES + b"\n"),
    "a long line of no interest without an end": ([b"x" * LINE_BYTES], b""),
}


@pytest.mark.parametrize("name", FILTERED)
def test_filtered_lines(tmp_path, name):
    pieces, written = FILTERED[name]
    sink = Sink(os.open(tmp_path / "filtered", os.O_WRONLY | os.O_CREAT), name="filtered")
    route = FilteredRoute(sink, prefix=b"0: ", words=[b"apple", b"plum", b"fig"])
    for piece in pieces:
        route.feed(piece)
    route.finish()
    sink.close()
    assert (tmp_path / "filtered").read_bytes() == written


@pytest.mark.parametrize(("word", "written"), [(b"fig", b"0: fig" + b"x" * LINE_BYTES + b"\n"), (b"plum", b"")])
def test_a_long_line_of_a_silent_rank_is_ended_only_where_it_is_written(tmp_path, word, written):
    sink = Sink(os.open(tmp_path / "filtered", os.O_WRONLY | os.O_CREAT), name="filtered")
    route = FilteredRoute(sink, prefix=b"0: ", words=[word])
    route.feed(b"fig" + b"x" * LINE_BYTES)
    route.break_line()
    assert sink.line_owner is None
    sink.close()
    assert (tmp_path / "filtered").read_bytes() == written


@pytest.mark.parametrize(("word", "rest"), [(b"fig", b"0: y\n"), (b"plum", b"")])
def test_the_rest_of_a_long_line_that_another_rank_has_interrupted_is_written_too(tmp_path, word, rest):
    sink = Sink(os.open(tmp_path / "filtered", os.O_WRONLY | os.O_CREAT), name="filtered")
    route = FilteredRoute(sink, prefix=b"0: ", words=[word])
    route.feed(b"fig" + b"x" * LINE_BYTES)
    route.break_line()
    OutputRoute(sink, prefix=b"1: ", exclusive=False).feed(b"pear\n")
    route.feed(b"y\npear\n")
    route.finish()
    sink.close()
    assert (tmp_path / "filtered").read_bytes().endswith(b"1: pear\n" + rest)


needs_proc = pytest.mark.skipif(not os.path.exists(FDS), reason="descriptors are counted in /proc")


@needs_proc
def test_the_files_of_an_attempt_that_cannot_be_made_leave_no_descriptors(tmp_path):
    folder = RunFolder(path=str(tmp_path), kept=True, fd=os.open(tmp_path, os.O_RDONLY), secure=False)
    before = os.listdir(FDS)
    with pytest.raises(LaunchError, match="log cannot be written"):
        make_rank_files(folder, restarts=0, ranks=2, private=str(tmp_path / "missing"))
    assert os.listdir(FDS) == before
    os.close(folder.fd)


@needs_proc
@pytest.mark.parametrize("missing", ["filtered_stderr.log", "1/stdout.log"])
def test_an_attempt_whose_logs_cannot_be_opened_leaves_no_descriptors(tmp_path, missing):
    for name in ("0", "1", missing):
        (tmp_path / name).mkdir(parents=True)  # In place of a log, it cannot be opened.
    streams = StreamsPlan(redirects=(3, 3), tee=(3, 3), prefixes=("", ""), filters=(("a",), ("b",)))
    workers = [SimpleNamespace(index=index) for index in range(2)]
    plan = SimpleNamespace(workers=workers, launch=SimpleNamespace(show=None, stdin=None, reports_on_stdout=False))
    files = RankFiles(str(tmp_path), fd=os.open(tmp_path, os.O_RDONLY))
    before = os.listdir(FDS)
    with pytest.raises(LaunchError, match="log cannot be written"):
        open_rank_routing(plan, SimpleNamespace(streams=streams), files)
    assert os.listdir(FDS) == before
    files.close()
