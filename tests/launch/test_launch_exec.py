"""One worker without logs replaces the process that the user started."""

import os
import signal
import subprocess

import pytest

from tests.launch.launching import python, shell


def test_the_worker_is_the_process_the_user_started(launcher):
    process = launcher.start(python("import os; print(os.getpid())"))
    out, _ = process.communicate()
    assert int(out) == process.pid


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_launch_has_the_workers_exit_code(launcher, code):
    assert launcher.run(python(f"raise SystemExit({code})")).code == code


def test_the_launch_ends_by_the_workers_signal(launcher):
    assert launcher.run(shell("kill -SEGV $$")).code == -signal.SIGSEGV


def test_the_worker_reads_standard_input(launcher):
    process = launcher.start(["/bin/cat"], popen={"stdin": subprocess.PIPE})
    assert process.communicate(b"hello")[0] == b"hello"


ODD = ["a b", "'", '"', "$HOME", "*", "a\nb", "", "\\", ";", "--", "\udcff\udcfe", "日本"]


def test_arguments_arrive_unchanged(launcher):
    code = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(os.fsencode(arg) for arg in sys.argv[1:]))"
    assert launcher.run(python(code, *ODD)).out == b"\0".join(os.fsencode(arg) for arg in ODD)


def test_arguments_arrive_unchanged_in_supervised_workers(launcher, tmp_path):
    code = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(os.fsencode(arg) for arg in sys.argv[1:]))"
    launcher.run(python(code, *ODD), python(code, *ODD), log_dir="logs")
    for index in (0, 1):
        logged = (tmp_path / "logs" / f"worker-{index}.log").read_bytes()
        assert logged == b"\0".join(os.fsencode(arg) for arg in ODD)


def test_the_environment_is_inherited_with_changes(launcher):
    worker = {"argv": ["/usr/bin/env"], "env": [["SET", "a b\n$x"], ["GONE", None], ["NEVER_THERE", None]]}
    environ = launcher.run(worker, env={"GONE": "1", "KEPT": "\udcff"}).out.decode(errors="surrogateescape")
    assert "SET=a b\n$x\n" in environ
    assert "KEPT=\udcff\n" in environ
    assert "GONE=" not in environ


def test_signals_that_python_ignores_have_their_default_action(launcher):
    assert launcher.run(shell("grep SigIgn /proc/$$/status")).lines == ["SigIgn:\t0000000000000000"]


def test_the_command_is_looked_up_in_the_workers_path(launcher, tmp_path):
    program = tmp_path / "bin" / "only-here"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    outcome = launcher.run({"argv": ["only-here"], "env": [["PATH", f"{program.parent}:/bin"]]})
    assert outcome.lines == ["found"]


def test_a_missing_command_is_127(launcher):
    outcome = launcher.run(["/no/such/program"])
    assert outcome.code == 127
    assert outcome.error == (
        "cpulaunch: error: command not found: /no/such/program\nhint: check the name or give a path\n"
    )


@pytest.mark.parametrize("binder", ["numactl", "taskset"])
def test_a_missing_binder_names_the_native_one(launcher, binder):
    outcome = launcher.run({"argv": [binder, "true"], "env": [["PATH", "/nowhere"]]}, binder=binder)
    assert outcome.code == 127
    assert f"cpulaunch: error: {binder} not found" in outcome.error
    assert "hint: --binder native" in outcome.error


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_without_executable_format_is_126(launcher, tmp_path, workers):
    program = tmp_path / "data"
    program.write_text("just text\n")
    program.chmod(0o755)
    outcome = launcher.run(*[[str(program)]] * workers)
    assert outcome.code == 126
    assert "cpulaunch: error: command is not in an executable format" in outcome.error
    assert len(outcome.error.splitlines()) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_whose_interpreter_is_missing_is_126(launcher, tmp_path, workers):
    program = tmp_path / "script"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    outcome = launcher.run(*[[str(program)]] * workers)
    assert outcome.code == 126
    assert "interpreter" in outcome.error


def test_a_file_that_is_not_executable_is_126(launcher, tmp_path):
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    outcome = launcher.run([str(tmp_path / "plain")])
    assert outcome.code == 126
    assert "hint: chmod +x" in outcome.error


@pytest.mark.parametrize("workers", [1, 2])
def test_an_environment_too_long_for_the_kernel_is_126(launcher, workers):
    worker = {"argv": ["/bin/true"], "env": [["LONG", "x" * (1 << 18)]]}
    outcome = launcher.run(*[worker] * workers)
    assert outcome.code == 126
    assert "cpulaunch: error: arguments and environment are too long" in outcome.error
