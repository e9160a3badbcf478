"""`--emit sh` of a job, run by a real sh without any tool that binds."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.emit.shell import plan_script
from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import Program
from tests.launch.launching import alive
from tests.plan.machines import machine, plan
from tests.strangers import UID, needs_root

HOST = machine(cores=4)
PRINT_VARIABLES = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
sys.stdout.write(json.dumps({name: os.environ[name] for name in names}) + "\\n")
"""


def script(flags: str, code: str) -> str:
    program = Program(kind="command", target=sys.executable, args=("-c", code))
    # The script looks for a free port with the Python of its PATH: a command brings none of its own.
    return plan_script(plan(HOST, f"--binder none {flags}", program=program))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with python3 and the few programs that every system has, none of which binds."""
    (tmp_path / "python3").symlink_to(sys.executable)
    for name in ("env", "mktemp", "mkfifo", "rm", "rmdir"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / name).symlink_to(program)
    return str(tmp_path)


def run(text: str, path: str, shell: str = "/bin/sh", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shell, "-c", text],
        env={"PATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def variables_by_rank(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda each: each["RANK"])


def test_all_ranks_start_with_their_variables_and_one_free_port(path: str) -> None:
    first, second = variables_by_rank(
        run(script("--nproc-per-node 2", PRINT_VARIABLES), path, RANK="9", MASTER_PORT="1")
    )
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["WORLD_SIZE"], second["LOCAL_RANK"]) == ("2", "1")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert 1024 < int(first["MASTER_PORT"]) < 65536
    assert first["TORCHELASTIC_RUN_ID"] == second["TORCHELASTIC_RUN_ID"]


def test_a_requested_port_and_name_are_used(path: str) -> None:
    (only,) = variables_by_rank(run(script("--master-port 4321 --rdzv-id it's", PRINT_VARIABLES), path))
    assert (only["MASTER_PORT"], only["TORCHELASTIC_RUN_ID"]) == ("4321", "it's")


def test_the_first_rank_to_fail_ends_the_others_and_decides_the_exit_code(path: str) -> None:
    code = "import os, signal, sys; sys.exit(5) if os.environ['RANK'] == '1' else signal.pause()"
    assert run(script("--nproc-per-node 3", code), path).returncode == 5


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_rank_that_fails_while_the_others_start_ends_them_too(path: str, tmp_path: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "tmp").mkdir()
    fail = Program(kind="command", target="/bin/sh", args=("-c", '[ "$RANK" = 1 ] && exit 3; exec "$0" 600', SLEEP))
    text = plan_script(plan(HOST, "--binder none --nproc-per-node 4 --master-port 4321", program=fail))
    for _ in range(20):  # The race occurs about once in ten runs.
        assert run(text, path, program, TMPDIR=str(tmp_path / "tmp")).returncode == 3
    assert not list((tmp_path / "tmp").iterdir())


SLEEP = shutil.which("sleep") or "sleep"


def ready(text: str, path: str) -> "subprocess.Popen[str]":
    """The script, with both of its ranks running."""
    process = subprocess.Popen(["/bin/sh", "-c", text], env={"PATH": path}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
    return process


WAITING = "import signal; print('ready', flush=True); signal.pause()"


def test_a_folder_that_others_put_in_place_of_the_scripts_own_keeps_what_is_in_it(path: str, tmp_path: Path) -> None:
    """As they can where a group may write to TMPDIR."""
    temporary = tmp_path / "tmp"
    (temporary / "results/deep").mkdir(parents=True)
    (temporary / "results/deep/keep").touch()
    code = f"""
import os
os.chdir({str(temporary)!r})
[folder] = (name for name in os.listdir() if name != "results")
os.rename(folder, "away")
os.rename("results", folder)
"""
    run(script("--nproc-per-node 1", code), path, TMPDIR=str(temporary))
    assert list(temporary.glob("*/deep/keep"))


SHELLS = pytest.mark.parametrize("shell", ["sh", "dash", "bash", "busybox"])


def exchanged(text: str, path: str, temporary: Path, shell: str, *, before_mkfifo: str) -> int:
    """The exit code of a script whose folder another user exchanges just before the script makes its pipe."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    temporary.mkdir(mode=0o777)
    os.chown(temporary, UID, UID)
    tool = temporary.parent / "exchange"
    tool.write_text(f"#!{sys.executable}\n{before_mkfifo}\nos.execvp('mkfifo', ['mkfifo', *sys.argv[1:]])\n")
    tool.chmod(0o755)
    text = f'mkfifo() {{ {tool} "$@"; }}\n{text}'  # busybox has a mkfifo of its own.
    words = [program, "sh"] if shell == "busybox" else [program]
    environ = {"PATH": path, "TMPDIR": str(temporary)}
    done = subprocess.run([*words, "-c", text], env=environ, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode


PUT_LINK = f"""
import os, sys
folder = os.path.dirname(sys.argv[-1])
os.rename(folder, folder + ".moved")
os.mkdir(folder, 0o777)
os.symlink(VICTIM, folder + "/alive")
open(folder + "/first", "w").write("42\\n")
os.chown(folder, {UID}, {UID})
"""


@needs_root
@SHELLS
def test_a_link_that_others_put_in_place_of_the_scripts_pipe_is_not_written(
    path: str, tmp_path: Path, shell: str
) -> None:
    """The owner of the folder above can put another folder in its place."""
    victim = tmp_path / "victim"
    victim.write_text("important")
    put = f"VICTIM = {str(victim)!r}\n{PUT_LINK}"
    text = script("--nproc-per-node 2 --master-port 4321", "import signal; signal.pause()")
    assert exchanged(text, path, tmp_path / "tmp", shell, before_mkfifo=put) == 125
    assert victim.read_text() == "important"


PUT_AFTER_MKFIFO = f"""
import os, subprocess, sys
folder = os.path.dirname(sys.argv[-1])
subprocess.run(["mkfifo", *sys.argv[1:]], check=True)
os.rename(folder, folder + ".moved")
os.mkdir(folder, 0o777)
MAKE(folder)
os.chown(folder, {UID}, {UID})
sys.exit(0)
"""


@needs_root
@SHELLS
@pytest.mark.parametrize("make", ["os.mkdir(folder + '/alive')", "os.mkfifo(folder + '/first')"])
def test_ranks_end_where_others_exchange_the_folder_after_the_pipe_was_made(
    path: str, tmp_path: Path, shell: str, make: str
) -> None:
    """What cannot be opened, and a pipe without a reader: neither holds the script, or leaves a rank."""
    put = PUT_AFTER_MKFIFO.replace("MAKE(folder)", make)
    rank = f"import os, signal; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); signal.pause()"
    text = script("--nproc-per-node 1 --master-port 4321", rank)
    assert exchanged(text, path, tmp_path / "tmp", shell, before_mkfifo=put) == 125
    started = tmp_path / "pid"
    assert not (started.exists() and alive(int(started.read_text() or 0)))


PIPE_OF_SCRIPT = """
import contextlib, os, shutil, signal, sys, time

def has_opened_its_pipe(pid):
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/fd/9").startswith(FOLDER):
            return True
    return pid > 1 and has_opened_its_pipe(int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]))

def wait_for_the_script():
    while not has_opened_its_pipe(os.getppid()):
        time.sleep(0.01)  # The script announces nothing when it has opened its pipe.
"""
CLEARING = f"""{PIPE_OF_SCRIPT}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
wait_for_the_script()
shutil.rmtree(FOLDER, ignore_errors=True)
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_clears_the_folder_of_temporary_files_keeps_its_exit_code(
    path: str, tmp_path: Path, code: int
) -> None:
    (tmp_path / "tmp").mkdir()
    clear = CLEARING.replace("FOLDER", repr(str(tmp_path / "tmp"))) + f"sys.exit({code})"
    done = run(script("--nproc-per-node 1", clear), path, TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == code


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_a_signal_decides_the_code_also_where_the_folder_was_cleared(path: str, tmp_path: Path, shell: str) -> None:
    program = shutil.which(shell)
    assert program is not None
    (tmp_path / "tmp").mkdir()
    code = CLEARING.replace("FOLDER", repr(str(tmp_path / "tmp"))) + "print('cleared', flush=True); signal.pause()"
    text = script("--nproc-per-node 1 --master-port 4321", code)
    environ = {"PATH": path, "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen([program, "-c", text], env=environ, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "cleared\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 143


FAILING = f"""{PIPE_OF_SCRIPT}
def end(*_):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    AT_END

if os.environ["RANK"] == "0":
    wait_for_the_script()
    while not os.path.exists(FOLDER + "/../ready"):
        time.sleep(0.01)  # Until the other rank, a process of its own, has its handler.
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
open(FOLDER + "/../ready", "w").close()
while True:
    signal.pause()
"""
CLEAR = 'shutil.rmtree(FOLDER, ignore_errors=True); print("cleared", flush=True)'
REMOVE_FILES = "[os.remove(os.path.join(at, name)) for at, _, names in os.walk(FOLDER) for name in names]; sys.exit(0)"


def failing(at_end: str, folder: Path) -> str:
    """The script of two ranks, of which the first fails and the other runs `at_end` when it is told to end."""
    code = FAILING.replace("AT_END", at_end).replace("FOLDER", repr(str(folder)))
    return script("--nproc-per-node 2 --master-port 4321", code)


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_a_failure_decides_the_code_also_before_a_signal(path: str, tmp_path: Path, shell: str) -> None:
    program = shutil.which(shell)
    assert program is not None
    (tmp_path / "tmp").mkdir()
    text = failing(CLEAR, tmp_path / "tmp")
    environ = {"PATH": path, "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen([program, "-c", text], env=environ, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "cleared\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 3


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_a_failure_is_one_where_a_program_has_removed_the_scripts_files(path: str, tmp_path: Path, shell: str) -> None:
    program = shutil.which(shell)
    assert program is not None
    (tmp_path / "tmp").mkdir()
    done = run(failing(REMOVE_FILES, tmp_path / "tmp"), path, program, TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 3


EXCHANGE_LATER = f"""{PIPE_OF_SCRIPT}
script, FOLDER = os.getppid(), os.path.dirname(sys.argv[-1])
pid = os.fork()
if pid == 0:
    folder = FOLDER
    while not (os.path.exists(RUNNING) and has_opened_its_pipe(script)):
        time.sleep(0.01)
    os.rename(folder, folder + ".moved")
    os.mkdir(folder)
    open(folder + "/first", "w").write("42\\n")
    os.chown(folder, OWNER, OWNER)
    open(RUNNING + ".exchanged", "w").close()
    os._exit(0)
"""


@needs_root
@SHELLS
@pytest.mark.parametrize(("owner", "code"), [(UID, 125), (0, 42)])
def test_the_exit_code_of_a_folder_of_others_is_not_the_scripts(
    path: str, tmp_path: Path, shell: str, owner: int, code: int
) -> None:
    running = str(tmp_path / "running")
    exchange = f"RUNNING, OWNER = {running!r}, {owner}\n{EXCHANGE_LATER}"
    wait = f"""
import os, time
open({running!r}, "w").close()
while not os.path.exists({running!r} + ".exchanged"):
    time.sleep(0.01)
"""
    text = script("--nproc-per-node 1 --master-port 4321", wait)
    assert exchanged(text, path, tmp_path / "tmp", shell, before_mkfifo=exchange) == code


@pytest.mark.parametrize("written", ["", "x", "1; echo", "99999"])
def test_what_is_no_exit_code_is_a_failure(path: str, tmp_path: Path, written: str) -> None:
    (tmp_path / "tmp").mkdir()
    code = f"import glob; open(glob.glob({str(tmp_path)!r} + '/tmp/*')[0] + '/first', 'w').write({written!r} + '\\n')"
    assert run(script("--nproc-per-node 1", code), path, TMPDIR=str(tmp_path / "tmp")).returncode == 1


def test_a_failure_is_one_where_there_was_no_space_for_its_code(path: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    code = f"import glob, sys; open(glob.glob({str(tmp_path)!r} + '/tmp/*')[0] + '/first', 'w'); sys.exit(3)"
    assert run(script("--nproc-per-node 1", code), path, TMPDIR=str(tmp_path / "tmp")).returncode == 3


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_pipe_in_place_of_the_code_holds_nothing(path: str, tmp_path: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "tmp").mkdir()
    make = f"import glob, os, sys; os.mkfifo(glob.glob({str(tmp_path)!r} + '/tmp/*')[0] + '/first'); sys.exit(3)"
    code = f"import os\nif os.environ['RANK'] == '0': exec({make!r})\n{WAITING}"
    done = run(script("--nproc-per-node 2", code), path, program, TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode in ({3} if shell == "sh" else {3, 138, 143})  # bash may lose a code at a signal.


KILLED = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(("code", "status", "output"), [("print('done')", 0, "done\n" * 2), (KILLED, 137, "")])
@pytest.mark.parametrize("flags", ["--nproc-per-node 2", "--instances 2"])
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_process_with_the_number_of_an_ended_worker_does_not_hold_the_script(
    path: str, shell: str, flags: str, code: str, status: int, output: str
) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    taken = 'kill() { [ "$1" = -0 ] || command kill "$@"; }\n'  # As if every number were a process's.
    done = run(taken + script(flags, code), path, program)
    assert (done.returncode, done.stdout) == (status, output)


def test_the_exit_code_of_a_worker_that_ends_just_after_a_signal_is_the_scripts(path: str) -> None:
    """The shell may know its end before the script asks for it."""
    gone = 'kill() { [ "$1" != -0 ] && command kill "$@"; }\n'
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *given: sys.exit(7)); " + WAITING
    with ready(gone + script("--instances 2", code), path) as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_ranks(path: str, number: signal.Signals) -> None:
    with ready(script("--nproc-per-node 2", WAITING), path) as process:
        os.kill(process.pid, number)
        assert process.communicate(timeout=60)[0] == ""
        assert process.returncode == 128 + number


def test_ranks_end_with_a_script_that_is_killed(path: str) -> None:
    with ready(script("--nproc-per-node 2", WAITING), path) as process:
        process.kill()
        assert process.communicate(timeout=60)[0] == ""  # No rank is left that holds the pipe open.


def test_a_script_names_the_options_that_it_leaves_out() -> None:
    text = script("--nproc-per-node 2 --report r.json --log-dir logs --max-restarts 2 --redirects 1", "pass")
    (line,) = [line for line in text.splitlines() if line.startswith("# This script leaves out")]
    for flag in ("--report", "--log-dir", "--max-restarts", "--redirects"):
        assert flag in line
    assert "leaves out" not in script("--nproc-per-node 2", "pass")
    instances = plan(HOST, "--instances 2 --log-dir d", program=Program(kind="command", target="x"))
    assert "# This script leaves out --log-dir." in plan_script(instances)


def test_a_script_for_several_hosts_is_an_error() -> None:
    with pytest.raises(UsageError, match="one host only"):
        script("--nnodes 2 --master-addr a", "pass")
