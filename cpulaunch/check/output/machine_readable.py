"""Findings as JSON, as SARIF 2.1.0 and as annotations of GitHub's workflows."""

from typing import Any
from urllib.parse import quote

from cpulaunch.check.findings import SourceFinding
from cpulaunch.check.session import CheckReport
from cpulaunch.records.errors import escaped

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def check_json(report: CheckReport) -> dict[str, Any]:
    """The object that docs/schemas/check.json describes."""
    return {
        "schema": 1,
        "files": report.files,
        "fixed": report.fixed,
        "findings": [_finding(each) for each in report.findings],
        "unreadable": [{"file": each.path, "reason": each.reason} for each in report.unreadable],
    }


def _finding(each: SourceFinding) -> dict[str, Any]:
    return {
        "rule": each.rule.id,
        "file": each.path,
        "cell": each.cell,
        "line": each.line,
        "column": each.column,
        "end_line": each.end_line,
        "end_column": each.end_column,
        "seen": each.seen,
        "why": each.rule.why,
        "fix": each.rule.fix,
        "automatic": "no" if each.edit is None else "unsafe" if each.edit.unsafe else "safe",
    }


def check_sarif(report: CheckReport, version: str) -> dict[str, Any]:
    """A SARIF log with one run."""
    rules = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.summary},
            "fullDescription": {"text": rule.why},
            "help": {"text": rule.fix},
        }
        for rule in report.rules
    ]
    unreadable = [
        {"level": "error", "message": {"text": f"{escaped(each.path)}: {escaped(each.reason)}"}}
        for each in report.unreadable
    ]
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "cpulaunch", "version": version, "rules": rules}},
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {"executionSuccessful": not unreadable, "toolExecutionNotifications": unreadable},
                ],
                "results": [_sarif_result(each) for each in report.findings],
            }
        ],
    }


def _sarif_result(each: SourceFinding) -> dict[str, Any]:
    region = {
        "startLine": each.line,
        "startColumn": each.column,
        "endLine": each.end_line,
        "endColumn": each.end_column,
    }
    location: dict[str, Any] = {"artifactLocation": {"uri": _uri(each.path)}}
    if each.cell is None:
        location["region"] = region
    return {
        "ruleId": each.rule.id,
        "level": "warning",
        "message": {"text": _message(each)},
        "locations": [{"physicalLocation": location}],
    }


def _uri(path: str) -> str:
    """A relative reference, or a URI with a scheme for an absolute path. Source: SARIF 2.1.0, 3.4.3."""
    quoted = quote(_from_here(path).encode("utf-8", "surrogateescape"))
    return f"file://{quoted}" if quoted.startswith("/") else quoted


def _from_here(path: str) -> str:
    """A path as git and GitHub write it."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return "/" * path.startswith("/") + "/".join(parts)


def check_github(report: CheckReport) -> str:
    """Workflow commands, one line each. Source: GitHub's documentation of workflow commands."""
    lines = [
        f"::warning file={_property(_from_here(each.path))},{_github_place(each)}"
        f"title={_property(f'cpulaunch {each.rule.id}')}::{_data(_message(each))}"
        for each in report.findings
    ]
    lines += [
        f"::error file={_property(_from_here(each.path))}::not checked: {_data(each.reason)}"
        for each in report.unreadable
    ]
    return "\n".join(lines)


def _github_place(each: SourceFinding) -> str:
    """Empty in a notebook, whose file has other lines than its cells."""
    return "" if each.cell is not None else f"line={each.line},col={each.column},endLine={each.end_line},"


def _message(each: SourceFinding) -> str:
    place = "" if each.cell is None else f"cell {each.cell}, line {each.line}: "
    return f"{place}{each.seen}. {each.rule.fix}"


def _data(text: str) -> str:
    return escaped(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
