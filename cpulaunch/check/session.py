"""A run of `cpulaunch check`: files read, checked and, if asked, fixed."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence

from cpulaunch.check.configuration import CheckConfiguration, configuration
from cpulaunch.check.files import programs, read_configuration, read_program, write_program
from cpulaunch.check.findings import Rule, SourceFinding, Unreadable
from cpulaunch.check.inspect_text import findings
from cpulaunch.check.notebooks import notebook
from cpulaunch.check.table import selected
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record, replace

PACKAGES = ("libcst", "torchfix")
"""What the extra `check` installs."""


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


def require_packages() -> None:
    """Raises: UsageError if the extra `check` is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError("check needs packages that are not installed", value=", ".join(missing), hint=INSTALL)


INSTALL = "python -m pip install 'cpulaunch[check]'"


def check_paths(
    paths: Sequence[str], *, select: Sequence[str] = (), ignore: Sequence[str] = (), fix: str = "none"
) -> CheckReport:
    """The findings in files and folders. Effect: with `fix`, changes the files. Raises: UsageError."""
    require_packages()
    settings = _configuration(paths)
    rules = selected(select or settings.select, (*ignore, *settings.ignore))
    found: list[SourceFinding] = []
    unreadable: list[Unreadable] = []
    count = fixed = 0
    for path in programs(paths, settings.exclude):
        if isinstance(path, Unreadable):
            unreadable.append(path)
            continue
        count += 1
        here, done = _check_file(path, rules, fix)
        fixed += done
        if isinstance(here, Unreadable):
            unreadable.append(here)
        else:
            found += here
    return CheckReport(files=count, rules=rules, findings=tuple(found), unreadable=tuple(unreadable), fixed=fixed)


def _configuration(paths: Sequence[str]) -> CheckConfiguration:
    first = paths[0]
    read = read_configuration(first if os.path.isdir(first) else os.path.dirname(first) or ".")
    return CheckConfiguration() if read is None else configuration(*read)


def _check_file(path: str, rules: Sequence[Rule], fix: str) -> tuple[list[SourceFinding] | Unreadable, int]:
    """The findings that are left in a file, and how many were fixed."""
    text = read_program(path)
    if isinstance(text, Unreadable):
        return text, 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # About the program's text, such as "\d" in a string.
            if path.endswith(".ipynb"):
                return _in_notebook(text, rules, path), 0
            found = findings(text, rules, path=path)
            return _after_fixes(path, text, rules, found, fix) if fix != "none" and found else (found, 0)
    except SyntaxError as error:
        return Unreadable(path=path, reason=f"line {error.lineno}: {error.msg}"), 0
    except (RecursionError, MemoryError):
        return Unreadable(path=path, reason="nested too deeply"), 0
    except ValueError as error:
        return Unreadable(path=path, reason=str(error)), 0


def _in_notebook(source: str, rules: Sequence[Rule], path: str) -> list[SourceFinding]:
    book = notebook(source)
    found = []
    for each in findings(book.text, rules, path=path):
        cell, line = book.places[each.line - 1]
        found.append(replace(each, cell=cell, line=line, end_line=line + each.end_line - each.line, edit=None))
    return found


def _after_fixes(
    path: str, text: str, rules: Sequence[Rule], found: list[SourceFinding], fix: str
) -> tuple[list[SourceFinding] | Unreadable, int]:
    from cpulaunch.check.fixes import fixed

    new, count = fixed(text, found, unsafe=fix == "unsafe")
    if not count:
        return found, 0
    failure = write_program(path, new)
    if failure is not None:
        return Unreadable(path=path, reason=f"cannot write: {failure}"), 0
    return findings(new, rules, path=path), count
