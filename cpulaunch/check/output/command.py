"""What `cpulaunch check` prints, from its options."""

import json
from collections.abc import Callable, Sequence

from cpulaunch import __version__
from cpulaunch.check.output.machine_readable import check_github, check_json, check_sarif
from cpulaunch.check.output.text import check_text, rule_text
from cpulaunch.check.session import check_paths
from cpulaunch.check.table import rule_named
from cpulaunch.records.errors import UsageError

FORMATS = ("text", "json", "sarif", "github")


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(each.strip() for each in text.split(",") if each.strip())


def explained(name: str, *, width: int) -> str:
    """The explanation of a rule. Raises: UsageError."""
    return rule_text(rule_named(name), width=width)


def checked(
    paths: Sequence[str],
    *,
    output: str,
    rules: tuple[Sequence[str], Sequence[str]],
    fix: str,
    page: tuple[int, bool],
    notify: Callable[[str], object],
) -> tuple[str, int]:
    """What to print, and the exit code. `rules`: selected and ignored ones; `page`: width and whether in colour;
    `notify`: writes a warning.

    Effect: with `fix`, changes the files. Raises: UsageError.
    """
    if output not in FORMATS:
        raise UsageError("no such format", value=output, hint=f"--format {'|'.join(FORMATS)}")
    if not paths:
        raise UsageError("no file or folder to check", hint="cpulaunch check train.py")
    report = check_paths(paths, notify=notify, select=rules[0], ignore=rules[1], fix=fix)
    if output == "json":
        text = json.dumps(check_json(report), indent=2)
    elif output == "sarif":
        text = json.dumps(check_sarif(report, __version__), indent=2)
    elif output == "github":
        text = check_github(report)
    else:
        text = check_text(report, width=page[0], color=page[1])
    return text, report.exit_code
