"""Findings for a terminal, one rule's explanation, and a rule's page."""

from collections.abc import Iterator

from cpulaunch.check.findings import Rule, SourceFinding
from cpulaunch.check.session import CheckReport
from cpulaunch.records.errors import escaped
from cpulaunch.view.text import painter, wrapped

OFF = "Off by default, because it is often wrong, or how often is not known: switch it on with --select {}."


def place(finding: SourceFinding) -> str:
    """`file:line:column`, in a notebook with the cell."""
    cell = "" if finding.cell is None else f":cell {finding.cell}"
    return f"{escaped(finding.path)}{cell}:{finding.line}:{finding.column}"


def check_text(report: CheckReport, *, width: int, color: bool) -> str:
    """Every finding with why and fix, said in full where a rule is found first; then what could not be checked."""
    return "\n".join(_lines(report, width, color))


def _lines(report: CheckReport, width: int, color: bool) -> Iterator[str]:
    bold, yellow, red = (painter(style, color=color) for style in ("bold", "yellow", "red"))
    explained: set[str] = set()
    for each in report.findings:
        yield f"{bold(place(each))}: {yellow(each.rule.id)}: {escaped(each.seen)}"
        if each.rule.id not in explained:
            explained.add(each.rule.id)
            yield from wrapped(each.rule.why, width, head="    why: ")
            yield from wrapped(each.rule.fix, width, head="    fix: ")
    for file in report.unreadable:
        yield f"{bold(escaped(file.path))}: {red('not checked')}: {escaped(file.reason)}"
    fixable = sum(each.edit is not None and not each.edit.unsafe for each in report.findings)
    yield (
        _counted(len(report.findings), "finding")
        + f" in {_counted(report.files, 'file')}"
        + (f"; {report.fixed} fixed" if report.fixed else "")
        + (f"; --fix changes {fixable} of them" if fixable else "")
    )


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def rule_text(rule: Rule, *, width: int) -> str:
    """What a rule finds, why, the fix, and an example of each kind."""
    lines = [f"{rule.id}: {rule.summary}", ""]
    lines += wrapped(rule.why, width, head="why: ") + wrapped(rule.fix, width, head="fix: ")
    if not rule.is_default:
        lines += ["", *wrapped(OFF.format(rule.id), width)]
    lines += ["", "found (lines with `# <-`):", "", *_indented(rule.wrong[0])]
    lines += ["", "not found:", "", *_indented(rule.right[0])]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.strip("\n").split("\n")]


def rule_page(rule: Rule) -> str:
    """The page of a rule in docs/rules: all its examples, which are its tests."""
    parts = [f"# {rule.id}", "", *wrapped(f"{rule.summary}.", 118), "", *wrapped(rule.why, 118), ""]
    parts += [*wrapped(f"**Fix.** {rule.fix}", 118), ""]
    if not rule.is_default:
        parts += [*wrapped(OFF.format(f"`{rule.id}`").replace("--select", "`--select`"), 118), ""]
    parts += [*wrapped(f"To silence it on a line: `# cpulaunch: ignore[{rule.id}]`.", 118), ""]
    parts += ["## Found", "", "On the lines with `# <-`.", ""]
    parts += [line for text in rule.wrong for line in ("```python", *text.strip("\n").split("\n"), "```", "")]
    parts += ["## Not found", ""]
    parts += [line for text in rule.right for line in ("```python", *text.strip("\n").split("\n"), "```", "")]
    return "\n".join(parts).rstrip("\n") + "\n"
