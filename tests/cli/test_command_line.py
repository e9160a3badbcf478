"""The command as a user meets it: real processes, exit codes, two-line errors, never a traceback."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests import json_output
from tests.roots import RootSpec, write_root


@pytest.fixture
def cpulaunch(tmp_path):
    """Run the command in an empty folder with an environment of its own."""

    def run(*arguments, env=None, shell=None, **options):
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), **(env or {})}
        argv = [sys.executable, "-m", "cpulaunch", *map(os.fsencode, arguments)]
        if shell is not None:
            argv = ["sh", "-c", shell, "sh", *argv]
        return subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, **options)

    return run


@pytest.fixture
def script(tmp_path):
    """A Python file with these lines."""

    def write(*lines, name="job.py"):
        path = tmp_path / name
        path.write_text("\n".join(lines))
        return path

    return write


def two_lines(result, code, *parts):
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("cpulaunch: error: ")
    assert lines[1].startswith("hint: ")
    for part in parts:
        assert part in result.stderr


def test_runs_a_program_with_its_arguments(cpulaunch, script):
    script("import sys, json", "print(json.dumps(sys.argv[1:]))")
    arguments = ["a b", "'\"", "$HOME", "*", "", "new\nline", "--instances", "-h"]
    assert json.loads(cpulaunch("job.py", *arguments).stdout) == arguments
    both = cpulaunch("--cpus", "0", "--oversubscribe", "--instances", "2", "job.py", *arguments).stdout.splitlines()
    assert sorted(both) == [f"[{index}] {json.dumps(arguments)}" for index in range(2)]


def test_one_worker_is_this_process(script):
    argv = [sys.executable, "-m", "cpulaunch", script("import os", "print(os.getpid())")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate(timeout=60)[0].split() == [str(process.pid)]


@pytest.mark.parametrize("options", [[], ["--cpus", "0", "--oversubscribe", "--instances", "2"]])
def test_the_exit_code_is_the_programs(cpulaunch, script, options):
    script("import sys", "print('said', file=sys.stderr)", "sys.exit(7)")
    result = cpulaunch(*options, "job.py")
    assert result.returncode == 7
    assert "said" in result.stderr
    assert ("exit code 7" in result.stderr) == bool(options)


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["absent.py"], 127, ["script not found: absent.py"]),
        (["."], 126, ["."]),
        (["--no-python", "no-such-command"], 127, ["no-such-command"]),
        (["--no-python", "./data.txt"], 126, ["data.txt"]),
        (["--instanses", "2", "job.py"], 2, ["--instanses", "did you mean --instances"]),
        (["--instances", "16000", "job.py"], 2, ["16,000 instances need 16,000 cores"]),
        (["--cpus", "99999", "job.py"], 2, ["99999"]),
        (["--numa-nodes", "77", "job.py"], 2, ["77"]),
        (["--cpus", "0-", "job.py"], 2, ["0-"]),
        (["--instances", "2", "--cores-per-instance", "5000", "job.py"], 2, ["5000"]),
        (["--binder", "none", "--membind", "bind", "job.py"], 2, ["membind"]),
        (["--profile", "no-such", "job.py"], 2, ["no-such"]),
        (["--profile", "broken.toml", "job.py"], 2, ["broken.toml", "line 2"]),
        (["--profile", "hostile.toml", "job.py"], 2, ["hostile.toml"]),
        (["--allocator", "mimalloc", "--sysroot", "/", "job.py"], 2, ["sysroot"]),
        (["--instances", "2", "--log-dir", "data.txt", "--cpus", "0", "--oversubscribe", "job.py"], 125, ["data.txt"]),
        (["--instances", "2"], 2, ["no script given"]),
        (["plan", "--sysroot", "absent", "job.py"], 2, ["absent"]),
        (["probe", "--sysroot", "absent"], 2, ["absent"]),
        (["probe", "--sysroot", ""], 2, ["directory not found"]),
        (["probe", "--sysroot", "."], 2, ["no captured machine", "sys/ and proc/"]),
        (["plan", "--sysroot", "."], 2, ["no captured machine"]),
        (["doctor", "--sysroot", "."], 2, ["no captured machine"]),
        (["probe", "--jsn"], 2, ["--jsn"]),
        (["profiles", "show", "no-such"], 2, ["no-such"]),
        (["profiles", "validate", "broken.toml"], 2, ["broken.toml", "line 2"]),
        (["profiles", "show", "auto"], 2, ["hint: cpulaunch profiles list"]),
        (["profiles", "frobnicate"], 2, ["frobnicate"]),
    ],
)
def test_invalid_input_is_two_lines_and_starts_nothing(cpulaunch, script, tmp_path, arguments, code, parts):
    script("open('started', 'w')")
    (tmp_path / "data.txt").write_text("data")
    (tmp_path / "broken.toml").write_text('summary = "a"\nkind = server\n')
    (tmp_path / "hostile.toml").write_text("#" * 10_000_000)
    two_lines(cpulaunch(*arguments), code, *parts)
    assert not (tmp_path / "started").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_script_is_two_lines(cpulaunch, script):
    script("pass").chmod(0)
    two_lines(cpulaunch("job.py"), 126, "job.py")


def test_a_corrupt_sysfs_is_two_lines(cpulaunch, tmp_path):
    root = write_root(tmp_path / "root", RootSpec(files={"sys/devices/system/cpu/online": "0-x"}))
    two_lines(cpulaunch("plan", "--sysroot", str(root), "job.py"), 125, "sys/devices/system/cpu/online", "0-x")


def test_json_is_the_plan_and_nothing_else(cpulaunch, script, tmp_path):
    script("pass")
    root = write_root(tmp_path / "root", RootSpec(sockets=2, cores_per_l3=4, smt=2))
    words = ("plan", "--json", "--instances", "2", "--sysroot", str(root), "job.py")
    plan = json_output.read("plan", cpulaunch(*words).stdout)
    assert {"schema", "mode", "profile", "world_size", "workers", "notes", "warnings"} <= set(plan)
    assert [worker["cpus"] for worker in plan["workers"]] == ["0-3", "4-7"]
    assert [worker["numa_nodes"] for worker in plan["workers"]] == ["0", "1"]
    assert all(note["origin"] and note["reason"] for note in plan["notes"])


def test_dry_run_is_the_plan(cpulaunch, script):
    script("open('started', 'w')")
    assert cpulaunch("--dry-run", "--json", "job.py").stdout == cpulaunch("plan", "--json", "job.py").stdout


def test_strict_turns_a_warning_into_an_error(cpulaunch, script, tmp_path):
    script("open('started', 'w')")
    lenient = cpulaunch("--profile", "graviton2", "job.py")
    assert lenient.returncode == 0
    assert "warning: profile graviton2 is for another machine" in lenient.stderr
    (tmp_path / "started").unlink()
    two_lines(cpulaunch("--strict", "--profile", "graviton2", "job.py"), 125, "graviton2", "--strict")
    two_lines(cpulaunch("plan", "--strict", "--profile", "graviton2", "job.py"), 125, "graviton2", "--strict")
    assert not (tmp_path / "started").exists()


def test_nothing_breaks_without_a_home(cpulaunch, script, tmp_path):
    script("print('ran')")
    result = cpulaunch("job.py", env={"HOME": "", "XDG_CACHE_HOME": "relative", "LC_ALL": "C"})
    assert (result.returncode, result.stdout) == (0, "ran\n")
    assert not (tmp_path / "relative").exists()


def test_an_interpreter_may_be_named_as_in_a_shell(cpulaunch, script, tmp_path):
    script("pass")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "snake").symlink_to(sys.executable)
    for named in ("snake", "bin/snake"):
        environ = {"PYTHON_EXEC": named, "PATH": f"{folder}:{os.environ['PATH']}"}
        (worker,) = json_output.read("plan", cpulaunch("plan", "--json", "job.py", env=environ).stdout)["workers"]
        assert worker["argv"][0] == str(folder / "snake")
    two_lines(cpulaunch("job.py", env={"PYTHON_EXEC": "no-such-snake"}), 127, "no-such-snake")


def test_a_plan_says_which_environment_is_ignored(cpulaunch, script):
    script("pass")
    said = cpulaunch("plan", "--brief", "job.py", env={"VIRTUAL_ENV": "/no/environment"}).stderr
    assert said == "cpulaunch: not an environment with a Python, and ignored: VIRTUAL_ENV=/no/environment\n"
    said = cpulaunch("plan", "-q", "job.py", env={"VIRTUAL_ENV": "/no/environment"}).stderr
    assert said == ""


def test_a_closed_pipe_causes_no_traceback(cpulaunch, script):
    script("pass")
    result = cpulaunch("--help", shell='exec 3>&1; { "$@"; echo "code $?" >&2; } | true')
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] in ("code 141", "code 0")


def test_a_closed_stderr_sends_nothing_to_stdout(cpulaunch, script):
    script("print('ran')")
    result = cpulaunch("--threads", "4096", "job.py", shell='"$@" 2>&-')
    assert (result.returncode, result.stdout) == (0, "ran\n")
    assert cpulaunch("no-such.py", shell='"$@" 2>&-').stdout == ""


def test_a_closed_stdout_causes_no_traceback(cpulaunch, script):
    script("pass")
    assert cpulaunch("job.py", shell='"$@" >&-').stderr == ""
    assert "Traceback" not in cpulaunch("plan", "job.py", shell='"$@" >&-').stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", [("plan", "job.py"), ("probe",), ("--help",)])
def test_a_full_disk_is_two_lines(cpulaunch, command):
    two_lines(cpulaunch(*command, shell='exec "$@" >/dev/full'), 125, "stdout")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error_in_json(cpulaunch):
    result = cpulaunch("plan", "--json", "job.py", shell='exec "$@" >/dev/full')
    (error,) = json_output.read_messages(result.stderr)
    assert (result.returncode, error["source"]) == (125, "stdout")


def test_several_workers_do_not_read_their_script_from_standard_input(cpulaunch):
    result = cpulaunch("--oversubscribe", "--instances", "2", "-", input="print('ran')")
    two_lines(result, 2, "2 workers cannot share")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("--no-such-option", "job.py"), 2),
        (("--oversubscribe", "--instances", "2", "job.py"), 3),
        (("--verbose", "job.py"), 3),
        (("--numa-nodes", "99", "job.py"), 2),
    ],
)
def test_an_exit_code_survives_a_full_disk_behind_stderr(cpulaunch, script, command, code):
    script("raise SystemExit(3)")
    assert cpulaunch(*command, shell='exec "$@" 2>/dev/full').returncode == code


@pytest.mark.parametrize("command", ["plan", "probe", "doctor"])
@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "1"}])
def test_limited_terminals_cause_no_traceback(cpulaunch, tmp_path, command, env):
    root = write_root(tmp_path / "machine", RootSpec())
    result = cpulaunch(command, "--sysroot", root, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


def test_an_emitted_script_keeps_the_bytes_of_an_odd_name(cpulaunch, script, tmp_path):
    odd = os.fsencode(tmp_path) + b"/\xff.py"
    with open(odd, "w") as file:
        file.write("print('odd')")
    environ = {"PYTHONIOENCODING": "utf-8:strict"}
    assert cpulaunch("plan", "--emit", "sh", odd, env=environ, shell='"$@" >plan.sh').returncode == 0
    assert subprocess.run(["sh", tmp_path / "plan.sh"], capture_output=True, check=True).stdout == b"odd\n"


def test_profiles_without_a_command_prints_its_help(cpulaunch):
    result = cpulaunch("profiles")
    assert (result.returncode, result.stderr) == (0, "")
    assert "validate" in result.stdout


def test_help_and_version(cpulaunch):
    for arguments in (["--help"], ["-h"], ["run", "--help"], ["plan", "-h"], []):
        result = cpulaunch(*arguments)
        assert result.returncode == 0
        assert "Usage: cpulaunch" in result.stdout
    assert cpulaunch("--version").stdout.startswith("cpulaunch ")
    assert "Usage: cpulaunch probe" in cpulaunch("probe", "--help").stdout


def test_probe_of_this_machine(cpulaunch, tmp_path):
    found = json_output.read("probe", cpulaunch("probe", "--json").stdout)
    assert found["schema"] == 1
    assert found["cpus"]
    assert cpulaunch("probe", "--svg", "map.svg").returncode == 0
    assert (tmp_path / "map.svg").read_text().startswith("<")
    two_lines(cpulaunch("probe", "--svg", "absent/map.svg"), 125, "absent/map.svg")


def test_emitted_scripts_run(cpulaunch, script, tmp_path):
    script("import os, sys", "print(sys.argv[1:], os.environ['OMP_NUM_THREADS'])")
    emitted = cpulaunch("plan", "--emit", "sh", "--binder", "taskset", "job.py", "it's $x").stdout
    path = Path(tmp_path / "run.sh")
    path.write_text(emitted)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    result = subprocess.run([path], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith('["it\'s $x"] ')


def test_this_process_does_not_affect_a_captured_machine(cpulaunch, script, tmp_path):
    """Neither its variables nor the libraries its variables point to."""
    script("pass")
    root = write_root(tmp_path / "root", RootSpec())
    ours = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "libabsent.so", "CONDA_PREFIX": str(tmp_path)}
    arguments = ("plan", "--json", "--sysroot", str(root), "job.py")
    assert cpulaunch(*arguments, env=ours).stdout == cpulaunch(*arguments).stdout


def test_a_tilde_that_the_shell_has_left_is_the_home_folder(cpulaunch, tmp_path):
    (tmp_path / "home" / "bin").mkdir(parents=True)
    (tmp_path / "home" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "a.py").write_text("")
    plan = json_output.read("plan", cpulaunch("plan", "--json", "--python=~", "a.py").stdout)
    assert plan["workers"][0]["argv"][0] == str(tmp_path / "home" / "bin" / "python")
