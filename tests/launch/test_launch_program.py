"""A program that can never start is an error before any worker starts, with the exit code of a shell."""

import itertools
import os
import re
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cpulaunch.launch.process.bind import UNBOUND
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.process.program import MAX_NAMES, check_program, check_shareable, find_executable, find_python
from cpulaunch.launch.process.spawn import check_executed
from cpulaunch.probe.software.interpreters import missing_torch
from cpulaunch.records.errors import NotExecutableError, NotFoundError, UsageError
from cpulaunch.records.request import Program, WorkerPython
from tests.plan.machines import machine
from tests.strangers import UID, needs_root


def script(path):
    return Program(kind="script", target=str(path), interpreter=sys.executable)


def test_a_readable_script_is_accepted(tmp_path):
    (tmp_path / "a b.py").write_text("")
    check_program(script(tmp_path / "a b.py"), {})


def test_a_missing_script_names_the_nearest(tmp_path):
    (tmp_path / "infer.py").write_text("")
    with pytest.raises(NotFoundError) as error:
        check_program(script(tmp_path / "infre.py"), {})
    assert error.value.exit_code == 127
    assert str(error.value).splitlines() == [
        f"script not found: {tmp_path}/infre.py",
        f"hint: did you mean {tmp_path}/infer.py?",
    ]


def test_a_word_that_is_no_script_may_be_a_mistyped_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError) as error:
        check_program(Program(kind="script", target="help", interpreter=sys.executable), {})
    assert str(error.value) == "no command or script named 'help'\nhint: see cpulaunch --help"


def test_a_word_that_is_almost_a_script_names_that_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(NotFoundError) as error:
        check_program(script("train"), {})
    assert str(error.value) == "no command or script named 'train'\nhint: did you mean train.py?"


def test_a_missing_script_is_compared_with_no_more_files_than_a_person_has(tmp_path):
    """Another user may make any number in /tmp, and to compare 20,000 takes seconds."""
    for number in range(MAX_NAMES + 1):
        (tmp_path / f"infer{number}.py").touch()
    with pytest.raises(NotFoundError, match=f"hint: searched in {re.escape(str(tmp_path))}; use -m for a module"):
        check_program(script(tmp_path / "infre1.py"), {})


def test_of_a_folder_with_any_number_of_files_no_more_names_are_read_than_are_compared(tmp_path, monkeypatch):
    numbers = itertools.count()

    @contextmanager
    def endless(path):
        yield (SimpleNamespace(name=f"infer{number}.py") for number in numbers)

    monkeypatch.setattr(os, "scandir", endless)
    with pytest.raises(NotFoundError, match="searched in"):
        check_program(script(tmp_path / "infre1.py"), {})
    assert next(numbers) == MAX_NAMES + 1


def test_a_missing_script_without_a_similar_name_names_the_directory(tmp_path):
    with pytest.raises(NotFoundError, match="searched in"):
        check_program(script(tmp_path / "train.py"), {})


def test_a_script_below_a_missing_directory_says_so(tmp_path):
    with pytest.raises(NotFoundError, match="there is no directory"):
        check_program(script(tmp_path / "none" / "train.py"), {})


def test_a_script_below_a_file_is_not_found(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotFoundError):
        check_program(script(tmp_path / "file" / "train.py"), {})


def test_a_directory_is_no_script(tmp_path):
    with pytest.raises(NotExecutableError, match="script is a directory") as error:
        check_program(script(tmp_path), {})
    assert error.value.exit_code == 126


def test_a_directory_that_python_can_run_is_a_script(tmp_path):
    (tmp_path / "__main__.py").write_text("")
    check_program(script(tmp_path), {})


def test_an_odd_name_stays_in_one_line(tmp_path):
    with pytest.raises(NotFoundError) as error:
        check_program(script(tmp_path / "a\nb\x1b[31m"), {})
    assert len(str(error.value).splitlines()) == 2
    assert "\x1b" not in str(error.value)


def test_a_name_too_long_is_an_error(tmp_path):
    with pytest.raises(NotExecutableError, match="File name too long"):
        check_program(script(tmp_path / ("x" * 5000)), {})


def test_an_unreadable_script_is_126(tmp_path):
    path = tmp_path / "secret.py"
    path.write_text("")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything (root)")
    with pytest.raises(NotExecutableError, match="script cannot be read"):
        check_program(script(path), {})


def test_a_script_behind_a_loop_of_links_is_126(tmp_path):
    (tmp_path / "loop.py").symlink_to("loop.py")
    with pytest.raises(NotExecutableError, match="script cannot be read"):
        check_program(script(tmp_path / "loop.py"), {})


def test_standard_input_and_modules_are_left_to_python():
    check_program(Program(kind="script", target="-", interpreter=sys.executable), {})
    check_program(Program(kind="module", target="no.such", interpreter=sys.executable), {})


@pytest.mark.parametrize("target", ["-", "/dev/stdin", "pipe"])
def test_several_workers_cannot_share_a_script_that_can_be_read_only_once(tmp_path, target):
    os.mkfifo(tmp_path / "pipe")
    program = Program(kind="script", target=os.path.join(tmp_path, target) if target == "pipe" else target)
    check_shareable(program, workers=1)
    with pytest.raises(UsageError, match="2 workers cannot share a script that can be read only once"):
        check_shareable(program, workers=2)


def test_several_workers_share_a_file_or_a_module(tmp_path):
    (tmp_path / "a.py").write_text("")
    check_shareable(script(tmp_path / "a.py"), workers=2)
    check_shareable(script(tmp_path), workers=2)
    check_shareable(Program(kind="module", target="-", interpreter=sys.executable), workers=2)


def test_a_missing_interpreter_is_named():
    with pytest.raises(NotFoundError, match="Python interpreter not found: /no/python"):
        check_program(Program(kind="module", target="m", interpreter="/no/python"), {})


def test_the_current_directory_may_have_been_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(NotFoundError, match=r"script not found: a.py\n.*the current directory was removed"):
        check_program(Program(kind="script", target="a.py", interpreter=sys.executable), {})
    python = WorkerPython(path="/no/python", origin="default", reason="default")
    (warning,) = missing_torch(machine(), Program(kind="module", target="m", interpreter="/no/python"), python, {})
    assert warning.startswith("/no/python (default) has no torch")


def test_a_missing_interpreter_is_named_with_what_chose_it():
    program = Program(kind="module", target="m", interpreter="/no/python")
    with pytest.raises(NotFoundError, match=r"^Python interpreter \(PYTHON_EXEC\) not found: /no/python"):
        check_program(program, {}, python="Python interpreter (PYTHON_EXEC)")


def test_a_python_is_found_by_its_environment(tmp_path):
    (tmp_path / "bin").mkdir()
    with pytest.raises(NotFoundError, match=r"no Python in the folder: .*/bin\n.*name the folder of an environment"):
        find_python(str(tmp_path / "bin"), {})
    (tmp_path / "bin/python").symlink_to("/no/such/python3.12")
    with pytest.raises(NotFoundError, match=r"bin/python\n.*it is a link to /no/such/python3.12, which leads nowhere"):
        find_python(str(tmp_path), {})
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    assert find_python(str(tmp_path), {}) == f"{tmp_path}/bin/python3"


@needs_root
@pytest.mark.parametrize("link", [False, True])
def test_a_folder_of_another_user_is_no_python_by_its_name(tmp_path, monkeypatch, link):
    """In /tmp anyone can put one in place of the Python of that name."""
    for folder in ("python3", "env"):
        (tmp_path / folder / "bin").mkdir(parents=True)
        (tmp_path / folder / "bin/python").symlink_to(sys.executable)
    if link:
        (tmp_path / "python3").rename(tmp_path / "own")
        (tmp_path / "python3").symlink_to("own")
    os.chown(tmp_path / "python3", UID, UID, follow_symlinks=False)
    (tmp_path / "bin").mkdir()
    for name in ("python3", "env"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o1777)
    assert find_python("python3", {"PATH": f"{tmp_path}/bin"}) == f"{tmp_path}/bin/python3"
    assert find_python("env", {"PATH": f"{tmp_path}/bin"}) == f"{tmp_path}/env/bin/python", "the user's own"
    assert find_python("./python3", {"PATH": f"{tmp_path}/bin"}) == f"{tmp_path}/python3/bin/python"
    tmp_path.chmod(0o755)  # As in an image with files of several users: no other one can have put it there.
    assert find_python("python3", {"PATH": f"{tmp_path}/bin"}) == f"{tmp_path}/python3/bin/python"


def test_commands_come_from_the_path_that_is_given(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    for directory in (first, second):
        directory.mkdir()
        (directory / "tool").write_text("")
    (second / "tool").chmod(0o755)
    assert find_executable("tool", {"PATH": f"{first}:{second}"}) == str(second / "tool")
    with pytest.raises(NotExecutableError):
        find_executable("tool", {"PATH": str(first)})
    with pytest.raises(NotFoundError, match=r"command not found: tool \(PATH\)"):
        find_executable("tool", {"PATH": str(tmp_path)})


def test_an_empty_name_is_not_found():
    with pytest.raises(NotFoundError):
        find_executable("", {"PATH": "/bin"})


def test_a_directory_is_no_command(tmp_path):
    with pytest.raises(NotExecutableError, match="command is a directory"):
        find_executable(str(tmp_path), {})


@pytest.mark.parametrize("message", [b"x", b"execve ", b"execve x", b"a b c", b"limits " + b"9" * 90, b"\xff"])
def test_a_start_message_that_no_worker_of_the_launch_writes_is_none(message):
    read, write = os.pipe()
    os.write(write, message)
    spec = ExecSpec(worker=0, path="/bin/true", argv=("true",), environ={}, binding=UNBOUND)
    assert check_executed(spec, read)
    os.close(read)
    os.close(write)
