"""Finding the program to execute, before any worker starts."""

from __future__ import annotations

import errno
import os
import stat
from itertools import islice

from cpulaunch.records.errors import CpulaunchError, NotExecutableError, NotFoundError, UsageError
from cpulaunch.records.request import Program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STANDARD_INPUT = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
BINDERS = ("numactl", "taskset")
PYTHONS = ("python", "python3")
"""The names of the Python in an environment's bin folder."""
MAX_NAMES = 1000
"""Files of a folder that are compared with a name, each in up to a millisecond: anyone may make many in /tmp."""


def child_environ(environ: Mapping[str, str], changes: Sequence[tuple[str, str | None]]) -> dict[str, str]:
    """The environment with these changes applied; None unsets a variable."""
    child = dict(environ)
    for name, value in changes:
        if value is None:
            child.pop(name, None)
        else:
            child[name] = value
    return child


def check_program(program: Program, environ: Mapping[str, str], *, python: str = "Python interpreter") -> None:
    """Raises: NotFoundError (127) or NotExecutableError (126) if the program can never start.

    `python`: what messages call the interpreter. A module is not looked up: only the interpreter can do that.
    """
    if program.kind == "command":
        find_executable(program.target, environ)
        return
    find_executable(program.interpreter, environ, what=python)
    if program.kind == "script" and program.target != "-":
        _check_script(program.target)


def check_shareable(program: Program, *, workers: int) -> None:
    """Raises: UsageError if several workers are to read a script from a pipe or from standard input."""
    if workers < 2 or program.kind != "script":
        return
    if program.target not in STANDARD_INPUT and not stat.S_ISFIFO(os.stat(program.target).st_mode):
        return
    raise UsageError(
        f"{workers} workers cannot share a script that can be read only once",
        value=printable(program.target),
        source="several workers get no standard input",
        hint="save the script as a file",
    )


def _check_script(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.isalnum():  # A mistyped command of cpulaunch is more likely than a script without a suffix.
            hint = _similar_file(path) or "see cpulaunch --help"
            raise NotFoundError(f"no command or script named {path!r}", hint=hint) from None
        raise NotFoundError("script not found", value=printable(path), hint=_suggestion(path)) from None
    except (OSError, ValueError) as error:
        raise _access_error("script cannot be read", path, error) from None
    if stat.S_ISDIR(mode):
        if os.path.isfile(os.path.join(path, "__main__.py")):
            return  # Python runs such a directory.
        hint = "name the script in it, or use -m for a module"
        raise NotExecutableError("script is a directory", value=printable(path), hint=hint)
    if not os.access(path, os.R_OK):
        raise NotExecutableError("script cannot be read", value=printable(path), hint=f"chmod +r {printable(path)}")


def _suggestion(path: str) -> str:
    """A hint: the file of the same directory with the most similar name, else the directory that was searched."""
    directory = os.path.dirname(path)
    if directory and not os.path.isdir(directory):
        return f"there is no directory {printable(directory)}"
    try:
        searched = os.path.abspath(directory or ".")
    except FileNotFoundError:
        return "the current directory was removed: change to one that exists"
    return _similar_file(path) or f"searched in {printable(searched)}; use -m for a module"


def _similar_file(path: str) -> str | None:
    """A hint: the file of the same directory with the most similar name; None if there is none, or too many files."""
    from difflib import get_close_matches

    if os.path.isfile(f"{path}.py"):
        return f"did you mean {printable(path)}.py?"
    directory, name = os.path.split(path)
    try:
        with os.scandir(directory or ".") as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_NAMES + 1))
    except OSError:
        return None
    if len(names) > MAX_NAMES:
        return None
    near = get_close_matches(name, names, n=1, cutoff=0.75)
    return f"did you mean {printable(os.path.join(directory, near[0]))}?" if near else None


def find_executable(name: str, environ: Mapping[str, str], *, what: str = "command") -> str:
    """The path of a command, searched in the PATH of `environ` as execvp(3) does.

    Raises: NotFoundError if there is no file of that name, NotExecutableError if it cannot be executed.
    """
    if os.path.dirname(name):
        candidates = [name]
    else:
        path = environ.get("PATH", os.defpath)
        candidates = [os.path.join(directory or ".", name) for directory in path.split(os.pathsep)] if name else []
    refused: CpulaunchError | None = None
    for candidate in candidates:
        try:
            mode = os.stat(candidate).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            refused = refused or _access_error(f"{what} cannot be executed", candidate, error)
            continue
        if stat.S_ISREG(mode) and os.access(candidate, os.X_OK):
            return candidate
        refused = refused or _not_executable(what, candidate, mode)
    raise refused or _not_found(what, name)


def find_python(requested: str, environ: Mapping[str, str]) -> str:
    """The path of a Python that is given by its path, by its name, or by its environment's folder.

    Raises: NotFoundError or NotExecutableError.
    """
    is_folder = os.path.isdir(requested) and is_meant(requested)
    path = _environment_python(requested) if is_folder else requested
    return os.path.abspath(find_executable(path, environ, what="Python interpreter"))


def is_meant(path: str) -> bool:
    """Whether there is a file or folder at the path that it stands for.

    A name alone stands for none of another user in the current folder: that user would choose what runs instead of the
    command of that name.
    """
    if not os.path.exists(path):
        return False
    if os.path.dirname(path) or path in (os.curdir, os.pardir):
        return True
    from cpulaunch.system.files.paths import is_of_current_folder  # Most programs are a script or have a path.

    try:
        return is_of_current_folder(path)
    except OSError:
        return False


def _environment_python(folder: str) -> str:
    """The path of an environment's Python, which may be a link that leads nowhere. Raises: NotFoundError."""
    paths = [os.path.join(folder, "bin", name) for name in PYTHONS]
    for exists in (os.path.exists, os.path.lexists):
        for path in filter(exists, paths):
            return path
    hint = "name the folder of an environment, which has bin/python, or a Python"
    raise NotFoundError("no Python in the folder", value=printable(folder), hint=hint)


def _not_found(what: str, name: str) -> NotFoundError:
    if name in BINDERS:
        return NotFoundError(
            f"{name} not found", value=name, source="--binder", hint="--binder native needs no program"
        )
    source = None if os.path.dirname(name) else "PATH"
    hint = "check the name or give a path"
    if source is None and os.path.islink(name):
        hint = f"it is a link to {printable(os.readlink(name))}, which leads nowhere"
    elif source is not None and os.path.exists(name):
        hint = f"to use that of the current folder{_refusal(name)}, write {printable(os.path.join(os.curdir, name))}"
    return NotFoundError(f"{what} not found", value=printable(name), source=source, hint=hint)


def _refusal(name: str) -> str:
    """Why this name alone does not stand for what has it in the current folder, as a clause; empty if it does."""
    if is_meant(name):
        return ""
    from cpulaunch.system.files.owners import is_trusted

    is_open = os.stat(os.curdir).st_mode & stat.S_IWOTH or is_trusted(os.lstat(name))
    return ", in which others may write" if is_open else ", though another user owns it"


def _not_executable(what: str, path: str, mode: int) -> NotExecutableError:
    if stat.S_ISDIR(mode):
        return NotExecutableError(f"{what} is a directory", value=printable(path), hint="name the program in it")
    return NotExecutableError(f"{what} is not executable", value=printable(path), hint=f"chmod +x {printable(path)}")


def _access_error(what: str, path: str, error: Exception) -> NotExecutableError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return NotExecutableError(
        what, value=printable(path), source=reason, hint="check the permissions of the file and its directories"
    )


def exec_error(path: str, code: int) -> CpulaunchError:
    """The error for an execve(2) that failed with this errno although `find_executable` had found the file."""
    source = f"execve: {os.strerror(code)}"
    value = printable(path)
    if code == errno.ENOEXEC:
        hint = "a script needs a first line such as #!/bin/sh"
        return NotExecutableError("command is not in an executable format", value=value, source=source, hint=hint)
    if code == errno.ENOENT:
        hint = "check the interpreter named in the file's first line"
        return NotExecutableError("command's interpreter not found", value=value, source=source, hint=hint)
    if code == errno.E2BIG:
        hint = "shorten the arguments or the environment"
        return NotExecutableError("arguments and environment are too long", value=value, source=source, hint=hint)
    return NotExecutableError("command cannot be executed", value=value, source=source, hint="check its permissions")


def printable(text: str) -> str:
    """The text as one line of printable characters, quoted where it has others."""
    plain = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return plain if plain.isprintable() and plain else repr(plain)
