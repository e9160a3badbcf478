"""A run of `cpulaunch check`: files read, checked and, if asked, fixed."""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from cpulaunch.check.configuration import CheckConfiguration, configuration
from cpulaunch.check.files import ProgramText, programs, read_configuration, read_program, write_program
from cpulaunch.check.findings import ProgramFile, Rule, SourceFinding, Unreadable
from cpulaunch.check.inspect_text import findings, mentions_torch
from cpulaunch.check.notebooks import notebook
from cpulaunch.check.table import selected
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record, replace
from cpulaunch.system.time_limit import NUMBER, OutOfTimeError, cpu_time_limit

PACKAGES = ("libcst", "torchfix")
"""What the extra `check` installs."""

MAX_SOURCE = 2 << 20
"""Characters. Parsed, they take up to a thousand times as many bytes."""

MAX_SECONDS = 60
"""Of CPU time for a file. Ordinary ones of 1 MiB take one; some rules take quadratic time over others."""


@record
class CheckReport:
    """What was found; `fixed`: how many findings were changed in the files."""

    files: int
    rules: tuple[Rule, ...]
    findings: tuple[SourceFinding, ...]
    unreadable: tuple[Unreadable, ...]
    fixed: int = 0

    @property
    def exit_code(self) -> int:
        """2 if something could not be checked, 1 if there are findings, else 0."""
        return 2 if self.unreadable else 1 if self.findings else 0


@record
class _FileResult:
    """What is left in a file after fixes, and how many there were."""

    findings: tuple[SourceFinding, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    fixed: int = 0
    is_file: bool = True


def require_packages() -> None:
    """Raises: UsageError if the extra `check` is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError("check needs packages that are not installed", value=", ".join(missing), hint=INSTALL)


INSTALL = "python -m pip install 'cpulaunch[check]'"


def check_paths(
    paths: Sequence[str],
    *,
    notify: Callable[[str], object],
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fix: str = "none",
) -> CheckReport:
    """The findings in files and folders. Effect: with `fix`, changes the files. Raises: UsageError."""
    require_packages()
    settings = _configuration(paths, notify)
    rules = selected(select or settings.select, (*ignore, *settings.ignore))
    results: list[_FileResult] = []
    seen: set[str] = set()
    for file in programs(paths, settings.exclude):
        if isinstance(file, Unreadable):
            results.append(_FileResult(unreadable=(file,), is_file=False))
        elif (target := os.path.realpath(file.path)) not in seen:
            seen.add(target)
            results.append(_check_file(file, rules, fix))
    return CheckReport(
        files=sum(each.is_file for each in results),
        rules=rules,
        findings=tuple(finding for each in results for finding in each.findings),
        unreadable=tuple(file for each in results for file in each.unreadable),
        fixed=sum(each.fixed for each in results),
    )


def _configuration(paths: Sequence[str], notify: Callable[[str], object]) -> CheckConfiguration:
    first = paths[0]
    read = read_configuration(first if os.path.isdir(first) else os.path.dirname(first) or ".", notify)
    return CheckConfiguration() if read is None else configuration(*read)


def _check_file(file: ProgramFile, rules: Sequence[Rule], fix: str) -> _FileResult:
    path, read = file.path, read_program(file.path)
    if isinstance(read, Unreadable):
        return _FileResult(unreadable=(read,))
    if file.is_test:
        return _FileResult()
    is_limited = NUMBER and threading.current_thread() is threading.main_thread()
    limit = cpu_time_limit(MAX_SECONDS) if is_limited else nullcontext()
    try:
        with warnings.catch_warnings(), limit:
            warnings.simplefilter("ignore", SyntaxWarning)  # About the program's text, such as "\d" in a string.
            if path.endswith(".ipynb"):
                return _in_notebook(read.text, rules, path)
            found = _findings(read.text, rules, path)
            return _after_fixes(path, read, rules, found, fix) if fix != "none" else _FileResult(findings=tuple(found))
    except SyntaxError as error:
        reason = f"line {error.lineno or 1}: {error.msg}"
    except (OutOfTimeError, SystemError):  # Python's parser turns the one into the other. Source: Python-ast.c.
        reason = f"takes longer than {MAX_SECONDS} s"
    except (RecursionError, MemoryError):
        reason = "nested too deeply"
    except ValueError as error:
        reason = str(error)
    return _FileResult(unreadable=(Unreadable(path=path, reason=reason),))


def _findings(text: str, rules: Sequence[Rule], path: str) -> list[SourceFinding]:
    """What rules find in a source. Raises: also ValueError for one that is too large."""
    if mentions_torch(text) and len(text) > MAX_SOURCE:
        raise ValueError(f"more than {MAX_SOURCE >> 20} MiB of source")
    return findings(text, rules, path=path)


def _in_notebook(source: str, rules: Sequence[Rule], path: str) -> _FileResult:
    if not mentions_torch(source):
        return _FileResult()
    book = notebook(source)
    found = []
    for each in _findings(book.text, rules, path):
        cell, line = book.places[each.line - 1]
        found.append(replace(each, cell=cell, line=line, end_line=line + each.end_line - each.line, edit=None))
    unreadable = tuple(Unreadable(path=path, reason=reason) for reason in book.unreadable)
    return _FileResult(findings=tuple(found), unreadable=unreadable)


def _after_fixes(
    path: str, read: ProgramText, rules: Sequence[Rule], found: list[SourceFinding], fix: str
) -> _FileResult:
    from cpulaunch.check.fixes import fixed

    new, count = fixed(read.text, found, unsafe=fix == "unsafe")
    if not count:
        return _FileResult(findings=tuple(found))
    left = tuple(_findings(new, rules, path))  # First, as it may take too long.
    failure = write_program(path, new, read)
    if failure is not None:
        return _FileResult(unreadable=(Unreadable(path=path, reason=f"cannot write: {failure}"),))
    return _FileResult(findings=left, fixed=count)
