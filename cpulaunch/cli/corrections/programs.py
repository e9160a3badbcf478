"""Programs that are not Python scripts: what a file's first bytes, or a command's name, say about how to run it."""

from __future__ import annotations

import os

from cpulaunch.launch.process.program import find_executable, is_meant, printable
from cpulaunch.records.errors import CpulaunchError, NotExecutableError, NotFoundError
from cpulaunch.records.record import replace
from cpulaunch.records.request import Program
from cpulaunch.system.files.reading import read_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEAD_BYTES = 256
"""As much of a first line as the kernel reads. Source: Linux, BINPRM_BUF_SIZE."""
ELF = b"\x7fELF"
SHELL_SUFFIXES = {".sh": "sh", ".bash": "bash", ".zsh": "zsh"}


def runnable(program: Program, environ: Mapping[str, str]) -> Program:
    """The program as its file says it runs: a script of another language, or a binary, as a command.

    A name that is no file, or one of another user in the current folder, is searched in PATH: Python, and scripts that
    Python runs, such as uvicorn, run.
    Raises: NotFoundError for any other command, NotExecutableError for a shell script without a first line `#!`.
    """
    path = program.target
    if not is_meant(path):
        return _of_command(program, environ)
    head = _head(path)
    shebang = _shebang(head)
    if head.startswith(ELF) or (shebang and not _is_python(shebang)):
        return replace(program, kind="command", target=_with_directory(path), interpreter="")
    if shebang:
        return replace(program, interpreter=_own_python(path, shebang) or program.interpreter)
    shell = SHELL_SUFFIXES.get(os.path.splitext(path)[1])
    if shell is not None:
        raise NotExecutableError(
            "not a Python script", value=printable(path), hint=f"cpulaunch --no-python {shell} {printable(path)}"
        )
    return program


def _head(path: str) -> bytes:
    """The first bytes of a regular file; none if it cannot be read, or is a pipe that can be read only once."""
    try:
        return read_start(path, max_bytes=HEAD_BYTES, links=True)
    except (OSError, ValueError):
        return b""


def _shebang(head: bytes) -> list[str]:
    """The words of a first line `#!`; `env` and its options are left out."""
    if not head.startswith(b"#!"):
        return []
    words = os.fsdecode(head[2:].split(b"\n")[0]).split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words


def _is_python(words: Sequence[str]) -> bool:
    return is_python_name(os.path.basename(words[0]))


def is_python_name(name: str) -> bool:
    """Whether this is the name of a Python interpreter: python, python3, python3.12, pypy3."""
    return name.rstrip("0123456789.t") in ("python", "pypy")


def _own_python(path: str, shebang: Sequence[str]) -> str | None:
    """The Python of the environment that a command such as uvicorn is installed in; None for any other script."""
    folder = os.path.dirname(os.path.abspath(path))
    return shebang[0] if os.path.dirname(shebang[0]) == folder else None


def _with_directory(path: str) -> str:
    """The path with a directory, without which it would be searched in PATH."""
    return path if os.path.dirname(path) else os.path.join(".", path)


def _of_command(program: Program, environ: Mapping[str, str]) -> Program:
    """The program that a command in PATH is.

    Raises: NotFoundError if Python does not run it, or if the current folder alone has it.
    """
    name = program.target
    if os.path.dirname(name) and not is_python_name(os.path.basename(name)):
        return program
    try:
        found = os.path.abspath(find_executable(name, environ))
    except CpulaunchError:
        if os.path.exists(name):
            raise
        return program
    if is_python_name(name):
        return _of_python(program, found)
    shebang = _shebang(_head(found))
    if shebang and _is_python(shebang):
        return replace(program, target=found, interpreter=_own_python(found, shebang) or program.interpreter)
    raise NotFoundError(
        f"no script named {name!r}; {printable(found)} is a command",
        hint=f"cpulaunch --no-python {_joined(name, *program.args)}",
    )


def _of_python(program: Program, python: str) -> Program:
    """What this Python is to run: a script, a module, or a command if it has other options."""
    args = program.args
    if args[:1] == ("-u",):  # Workers are unbuffered wherever it matters.
        args = args[1:]
    if len(args) > 1 and args[0] == "-m":
        return replace(program, kind="module", target=args[1], args=args[2:], interpreter=python)
    if args and not args[0].startswith("-"):
        return replace(program, target=args[0], args=args[1:], interpreter=python)
    return replace(program, kind="command", target=python, interpreter="")


def _joined(*words: str) -> str:
    from shlex import join

    return join(words)
