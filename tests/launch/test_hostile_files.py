"""Workers and other users that replace the files of a launch: nothing else is touched, and the launch goes on."""

import ctypes
import json
import os
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from cpulaunch.launch.hosts.agent.logs import LogFolder, open_log_folder
from cpulaunch.launch.ranks.files import make_rank_files, make_run_folder
from cpulaunch.records.errors import CpulaunchError, LaunchError
from cpulaunch.system.files.outputs import REPORT, check_path, save_output
from tests import json_output
from tests.launch.launching import eventually
from tests.strangers import AS_STRANGER, UID, as_stranger, folder_of_stranger, needs_root

strangers = pytest.fixture(folder_of_stranger)
SECONDS = 120
"""A launch that has not ended by then hangs."""


@pytest.fixture
def victim(tmp_path):
    """A folder and a file that an attacker wants to reach; it stays as it is."""
    folder = tmp_path / "victim"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/keep").write_text("keep")
    yield folder
    assert [(path.name, path.read_text()) for path in (folder / "deep").iterdir()] == [("keep", "keep")]
    assert [path.name for path in folder.iterdir()] == ["deep"]


@pytest.fixture
def cpulaunch(tmp_path):
    """Run the command in a folder with a program."""

    def run(code, *options, env=None, cwd=tmp_path):
        (tmp_path / "job.py").write_text(AS_STRANGER + "import os, sys\n" + textwrap.dedent(code))
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path), **(env or {})}
        process = subprocess.run(
            [sys.executable, "-m", "cpulaunch", *options, str(tmp_path / "job.py")],
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert "Traceback" not in process.stderr
        assert not list(tmp_path.glob("cpulaunch-*")), "the run's directory is gone"
        return process

    return run


EVENTS = "path = os.environ['CPULAUNCH_EVENTS']\n"
REPLACED = {
    "pipe": "os.unlink(path); os.mkfifo(path)",
    "folder": "os.unlink(path); os.mkdir(path)",
    "endless": "os.unlink(path); os.symlink('/dev/zero', path)",
    "gone": "os.unlink(path)",
    "deep": "os.chdir(os.path.dirname(path))\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')",
}


@pytest.mark.parametrize("code", REPLACED.values(), ids=REPLACED)
def test_an_event_file_that_a_worker_replaced_is_not_read(cpulaunch, tmp_path, code):
    process = cpulaunch(f"{EVENTS}{code}\nsys.exit(7)", "--report", "r.json", "--cpus", "0")
    assert process.returncode == 7
    assert json_output.read("report", (tmp_path / "r.json").read_text())["workers"][0]["plugin"] == "not loaded"


MALFORMED = {
    "nest": "'[' * 200000 + chr(10)",
    "big": """'{"event":"metric","pid":1,"name":"x","value":1' + '0' * 400 + '}' + chr(10)""",
    "inf": """'{"event":"metric","pid":1,"name":"x","value":1e999}' + chr(10)""",
    "no end": "'x' * (20 << 20)",
    "binary": "chr(10).join(map(chr, range(256)))",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_events_are_counted_and_change_no_exit_code(cpulaunch, tmp_path, text):
    code = f"{EVENTS}open(path, 'a', encoding='latin-1').write({text})"
    assert cpulaunch(code, "--report", "r.json", "--cpus", "0").returncode == 0
    (worker,) = json_output.read("report", (tmp_path / "r.json").read_text())["workers"]
    assert worker["ignored_events"] + worker["unread_event_bytes"] > 0
    assert worker["metrics"] == {}


@pytest.mark.parametrize(
    "code",
    [
        "os.mkfifo(path)",
        "os.symlink('/dev/zero', path)",
        "os.mkdir(path)",
        "open(path, 'w').write('[' * 900)",
    ],
    ids=["pipe", "endless", "folder", "nest"],
)
def test_an_error_file_that_a_rank_replaced_is_not_read(cpulaunch, tmp_path, code):
    code = f"path = os.environ['TORCHELASTIC_ERROR_FILE']\n{code}\nsys.exit(3)"
    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "outer.json")}
    assert cpulaunch(code, "--nproc-per-node", "1", env=env).returncode == 3


@needs_root
def test_a_link_in_place_of_an_attempt_is_not_followed(cpulaunch, strangers, victim):
    """The folder of the attempts is renamed by its owner, and another one put there, with a link."""
    code = f"""
    def swap():
        (run,) = os.listdir({str(strangers)!r})
        run = os.path.join({str(strangers)!r}, run)
        os.rename(run, run + ".moved")
        os.mkdir(run, 0o755)
        for number in range(3):
            os.symlink({str(victim)!r}, run + "/attempt_" + str(number))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        as_stranger(swap)
        sys.exit(5)
    print("again")
    """
    options = ("--nproc-per-node", "1", "--max-restarts", "1", "--log-dir", str(strangers), "--tee", "3")
    process = cpulaunch(code, *options)
    assert (process.returncode, process.stdout.splitlines()[-1:]) == (0, ["[default0]:again"]), process.stderr
    (moved,) = strangers.glob("*.moved")
    assert (moved / "attempt_1/0/stdout.log").read_text() == "again\n"


@needs_root
def test_an_error_file_is_not_written_through_a_link(cpulaunch, strangers, victim):
    """torch opens the error file by its path, in a folder whose owner may put links there."""
    target = victim / "deep/keep"
    code = f"""
    import json
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    def swap():
        for name in os.listdir({str(strangers)!r}):
            run = os.path.join({str(strangers)!r}, name)
            os.rename(run, run + ".moved")
            os.makedirs(run + "/attempt_0/0")
            os.symlink({str(target)!r}, run + "/attempt_0/0/error.json")
    as_stranger(swap)
    with open(path, "w") as file:
        json.dump({{"message": "why"}}, file)
    sys.exit(5)
    """
    process = cpulaunch(code, "--nproc-per-node", "1", "--log-dir", str(strangers))
    assert process.returncode == 5
    assert "why" in process.stderr
    (moved,) = strangers.glob("*.moved")
    assert json.loads((moved / "attempt_0/0/error.json").read_text()) == {"message": "why"}


@needs_root
def test_a_log_folder_that_is_a_link_while_it_is_checked_is_not_secure(strangers, monkeypatch):
    """The link's target is, which only root can change."""
    (strangers / "logs").mkdir()
    os.chown(strangers / "logs", UID, UID)
    mkdir = os.mkdir

    def swapping(name, *arguments, **options):
        mkdir(name, *arguments, **options)
        as_stranger(lambda: (strangers / "logs").rename(strangers / "moved"))
        as_stranger(lambda: (strangers / "logs").symlink_to("/root"))

    monkeypatch.setattr(os, "mkdir", swapping)
    plan = SimpleNamespace(launch=SimpleNamespace(log_dir=str(strangers / "logs")))
    folder = make_run_folder(plan, None, environ={}, run_id="run")
    os.close(folder.fd)
    assert not folder.secure


def test_the_files_of_a_secure_log_folder_are_named_without_its_links(tmp_path):
    """The owner of the folder of such a link may exchange it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    plan = SimpleNamespace(launch=SimpleNamespace(log_dir=str(tmp_path / "link")))
    folder = make_run_folder(plan, None, environ={}, run_id="run")
    os.close(folder.fd)
    assert folder.secure
    assert os.path.dirname(folder.path) == str(tmp_path / "real")


@pytest.fixture
def mapping_share(strangers, victim):
    """A folder of root, who can write only what belongs to the other user there, as on a share that maps users."""
    os.chown(strangers, 0, 0)
    strangers.chmod(0o1777)
    libc = ctypes.CDLL(None)
    libc.setfsuid(UID)
    try:
        yield strangers
    finally:
        libc.setfsuid(0)


@needs_root
def test_on_a_share_that_gives_roots_files_to_another_user_no_link_is_followed(mapping_share, victim):
    plan = SimpleNamespace(launch=SimpleNamespace(log_dir=str(mapping_share)))
    folder = make_run_folder(plan, None, environ={}, run_id="run")
    assert not folder.secure
    files = make_rank_files(folder, restarts=0, ranks=2, private=str(mapping_share))
    os.close(files.open_log("0/stdout.log"))
    as_stranger(lambda: os.rmdir(f"{folder.path}/attempt_0/1"))
    as_stranger(lambda: os.symlink(victim, f"{folder.path}/attempt_0/1"))
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        files.open_log("1/stdout.log")
    with open(files.error_file(1), "w") as file:
        file.write("why")
    files.close()
    with pytest.raises(LaunchError, match="logs of torch's agent cannot be on a share"):
        open_log_folder(str(mapping_share), "run")


@needs_root
def test_a_run_directory_in_another_users_folder_is_not_followed(cpulaunch, strangers, victim):
    code = f"""
    def swap():
        for name in os.listdir({str(strangers)!r}):
            run = os.path.join({str(strangers)!r}, name)
            os.rename(run, run + ".moved")
            os.symlink({str(victim)!r}, run)
    as_stranger(swap)
    """
    assert cpulaunch(code, "--report", "r.json", "--cpus", "0", env={"TMPDIR": str(strangers)}).returncode == 0


@needs_root
def test_a_report_is_not_written_through_another_users_link(cpulaunch, strangers, victim):
    target = str(victim / "deep/keep")
    code = f"""
    def plant():
        for pid in (os.getppid(), os.getpid(), *range(os.getpid(), os.getpid() + 50)):
            try:
                os.symlink({target!r}, {str(strangers)!r} + "/r.json." + str(pid) + ".new")
            except FileExistsError:
                pass
    as_stranger(plant)
    """
    report = strangers / "r.json"
    assert cpulaunch(code, "--report", str(report), "--cpus", "0").returncode == 0
    assert json_output.read("report", report.read_text())["exit_code"] == 0
    assert report.stat().st_mode & 0o777 == 0o600

    report.unlink()
    as_stranger(lambda: os.symlink(target, report))
    process = cpulaunch("print('started')", "--report", str(report), "--cpus", "0")
    assert (process.returncode, process.stdout) == (125, "")
    assert "r.json is a symbolic link of another user" in process.stderr


def make_file(path):
    path.touch()
    path.chmod(0o666)


def make_pipe(path):
    os.mkfifo(path)
    path.chmod(0o666)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    path.chmod(0o777)


TAKEN = {
    "file": (make_file, "r.json is another user's file in a sticky folder"),
    "pipe": (make_pipe, "r.json is a named pipe of another user"),
    "socket": (make_socket, "r.json is a socket"),
}


@needs_root
@pytest.mark.parametrize(("make", "reason"), TAKEN.values(), ids=TAKEN)
def test_a_report_whose_name_another_user_has_taken_is_refused_before_the_launch(strangers, make, reason):
    """In a sticky folder, such as /tmp."""
    os.chown(strangers, 0, 0)
    strangers.chmod(0o1777)
    report = strangers / "r.json"
    make(report)
    os.chown(report, UID + 1, UID + 1)

    def refused():
        check_path(REPORT, str(strangers / "new.json"))
        with pytest.raises(CpulaunchError, match=reason):
            check_path(REPORT, str(report))

    as_stranger(refused)


@needs_root
@pytest.mark.parametrize(
    "make", [make_file, os.mkdir, lambda path: path.symlink_to("x")], ids=["file", "folder", "link"]
)
def test_a_report_whose_name_another_user_takes_during_the_launch_is_beside_it(strangers, make):
    os.chown(strangers, 0, 0)
    strangers.chmod(0o1777)
    report = strangers / "r.json"
    make(report)
    os.chown(report, UID + 1, UID + 1, follow_symlinks=False)

    def save():
        error = save_output(REPORT, str(report), "content", direct=None)
        [beside] = (path for path in strangers.iterdir() if path != report)
        assert (beside.read_text(), beside.stat().st_mode & 0o777) == ("content", 0o600)
        assert f"; it is in {beside}" in str(error)

    as_stranger(save)


@needs_root
def test_root_is_told_of_another_users_pipe_before_the_launch_and_replaces_a_file(cpulaunch, strangers):
    report = strangers / "r.json"
    as_stranger(lambda: make_pipe(report))
    process = cpulaunch("print('started')", "--report", str(report), "--cpus", "0")
    assert (process.returncode, process.stdout) == (125, "")
    assert "r.json is a named pipe of another user" in process.stderr
    report.unlink()
    strangers.chmod(0o1777)
    as_stranger(lambda: make_file(report))
    assert cpulaunch("print('started')", "--report", str(report), "--cpus", "0").returncode == 0
    assert json_output.read("report", report.read_text())["exit_code"] == 0


@needs_root
def test_a_log_is_not_written_through_another_users_link(cpulaunch, strangers, victim):
    as_stranger(lambda: os.symlink(victim / "deep/keep", strangers / "worker-0.log"))
    process = cpulaunch("print('started')", "--log-dir", str(strangers), "--cpus", "0")
    assert process.returncode == 125
    assert "worker-0.log is a symbolic link of another user" in process.stderr
    as_stranger(lambda: os.symlink(victim, strangers / "logs"))
    assert cpulaunch("", "--log-dir", str(strangers / "logs/new"), "--cpus", "0").returncode == 125


def test_logs_below_own_links_are_written(cpulaunch, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "logs").symlink_to("real")
    (tmp_path / "real/worker-0.log").write_text("of an earlier run, and longer")
    assert cpulaunch("print('out')", "--log-dir", "logs", "--cpus", "0").returncode == 0
    assert (tmp_path / "real/worker-0.log").read_text().endswith("longerout\n")


@pytest.mark.parametrize("option", ["--report", "--html"])
def test_a_pipe_that_a_worker_puts_in_place_of_a_report_is_replaced(cpulaunch, tmp_path, option):
    """Nothing reads it: the launch must not wait. A pipe from before the launch gets the report."""
    assert cpulaunch("os.mkfifo('out')", option, "out", "--cpus", "0").returncode == 0
    assert (tmp_path / "out").is_file()
    assert "job.py" in (tmp_path / "out").read_text()


def test_a_report_goes_to_the_file_that_is_standard_output(tmp_path):
    (tmp_path / "job.py").write_text("print('line')")
    command = [sys.executable, "-m", "cpulaunch", "--report", "/dev/stdout", "--cpus", "0", "job.py"]
    with open(tmp_path / "out", "w") as out:
        assert subprocess.run(command, cwd=tmp_path, stdout=out, check=False, timeout=SECONDS).returncode == 0
    first, _, rest = (tmp_path / "out").read_text().partition("\n")
    assert first == "line"
    assert json_output.read("report", rest)["exit_code"] == 0


KILLED = """
import mmap, time
def hold(path):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 4096)
    return mmap.mmap(fd, 4096)

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return open(path).read()

if "worker-0" in os.environ["CPULAUNCH_EVENTS"]:
    path = f"/dev/shm/{os.getpid()}:{os.getuid()}:0"
    memory = hold(path)
    with open("path.new", "w") as file:
        file.write(path)
    os.rename("path.new", "path")
    wait_for("go"), wait_for("mapped")
    os.kill(os.getpid(), 9)
memory = hold(wait_for("path"))
open("mapped", "w").close()
time.sleep(600)
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux's /dev/shm")
def test_shared_memory_of_a_killed_worker_goes_and_another_containers_stays(tmp_path):
    """The other container's process is this one: the worker's number, and its own mapping."""
    (tmp_path / "job.py").write_text("import os\n" + KILLED)
    command = [sys.executable, "-m", "cpulaunch", "--report", "r.json", "--instances", "2", "--cpus", "0"]
    launch = subprocess.Popen([*command, "--oversubscribe", "job.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    path = eventually(lambda: (tmp_path / "path").exists() and (tmp_path / "path").read_text(), "the worker's memory")
    other = path[:-1] + "9"
    with open(other, "w+b") as file:
        file.write(bytes(4096))
        file.flush()
        try:
            (tmp_path / "go").touch()
            assert launch.wait(SECONDS) == 137, launch.stderr.read()
            assert (os.path.exists(path), os.path.exists(other)) == (False, True)
        finally:
            os.unlink(other)
            launch.communicate()


SEARCHED = """
from cpulaunch.system.files import shared_memory
from cpulaunch.__main__ import main
shared_memory.SEARCH_SECONDS = -1.0
main()
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux's /dev/shm")
def test_a_launch_says_that_dev_shm_has_too_many_names_to_look_through(tmp_path):
    """No number of other users' names delays the end of a launch for longer."""
    others = [f"/dev/shm/others-{os.getpid()}-{number}" for number in range(300)]
    (tmp_path / "job.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    command = [sys.executable, "-c", SEARCHED, "--report", "r.json", "--cpus", "0", "job.py"]
    try:
        for each in others:
            open(each, "w").close()
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    finally:
        for each in others:
            os.unlink(each)
    assert done.returncode == 137
    assert "/dev/shm has too many names to look through" in done.stderr


HOSTS = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", "1")
ALONE = ("--rdzv-conf", "last_call_timeout=1")
"""Each attempt waits no longer than that for another host, by default 30 s."""


@pytest.mark.torch
@needs_root
def test_logs_of_several_hosts_are_not_written_through_links(cpulaunch, strangers, victim):
    """torch's agent and its ranks write there by paths."""
    code = f"""
    def swap():
        (run,) = os.listdir({str(strangers)!r})
        run = os.path.join({str(strangers)!r}, run)
        os.rename(run, run + ".moved")
        for attempt in range(3):
            os.makedirs(run + f"/attempt_{{attempt}}/0")
            os.symlink({str(victim / "deep/keep")!r}, run + f"/attempt_{{attempt}}/0/error.json")
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        as_stranger(swap)
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        file.write('{{"message": {{"message": "why", "extraInfo": {{"py_callstack": "why", "timestamp": "1"}}}}}}')
    sys.exit(5)
    """
    options = (*HOSTS, *ALONE, "--max-restarts", "1", "--redirects", "3", "--log-dir", str(strangers))
    process = cpulaunch(code, *options)
    assert process.returncode == 5, process.stderr
    assert "why" in process.stderr
    (moved,) = strangers.glob("*.moved")
    assert [(moved / f"attempt_{n}/0/stdout.log").read_text() for n in (0, 1)] == ["attempt 0\n", "attempt 1\n"]
    assert f"log: {str(moved).removesuffix('.moved')}/attempt_1/0/stderr.log" in process.stderr
    assert "why" in (moved / "attempt_1/0/error.json").read_text()


@needs_root
def test_an_ordinary_users_logs_of_several_hosts_are_not_written_through_links(strangers, victim):
    os.chown(strangers, UID + 1, UID + 1)
    strangers.chmod(0o777)

    def work():
        folder = open_log_folder(str(strangers), "run/1")
        os.rename(folder.shown, folder.shown + ".moved")
        os.symlink(victim, folder.shown)
        with open(folder.path + "/new", "w"):
            assert os.path.samefile(folder.path, folder.shown + ".moved")

    as_stranger(work)
    (moved,) = strangers.glob("run_1_*.moved")
    assert [path.name for path in moved.iterdir()] == ["new"]


@needs_root
def test_a_folder_for_logs_of_several_hosts_is_not_made_without_proc(strangers, monkeypatch):
    is_folder = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: is_folder(path) and not str(path).startswith("/proc"))
    with pytest.raises(LaunchError, match="other users can change the folder of the logs"):
        open_log_folder(str(strangers), "run")
    assert list(strangers.iterdir()) == []


def test_the_agent_writes_logs_by_a_path_without_links_where_no_one_else_can(tmp_path):
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").mkdir()
    assert open_log_folder(f"{tmp_path}/link/new", "run") == LogFolder(path=f"{tmp_path}/real/new")
    assert (tmp_path / "real/new").is_dir()
    assert open_log_folder(os.devnull, "run") == LogFolder(path=os.devnull)
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="log cannot be written"):
        open_log_folder(f"{tmp_path}/file", "run")
