"""With --json, what a command says on stderr is JSON too, and stdout has one object or nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.cli.arguments import canonical, value_count
from cpulaunch.cli.corrections.json_option import asks_for_json
from cpulaunch.cli.main import run_command_line
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.view.message_view import error_json, notice_json
from tests import json_output

ERRORS = [
    ("plan --json --instances two a.py", 2, "usage", ["--instances"]),
    ("--json --no-such 3 --neither a.py", 2, "usage", ["--no-such", "--neither"]),
    ("--no-such 3 --json a.py", 2, "usage", ["--no-such"]),
    ("--json=yes a.py", 2, "usage", ["--json"]),
    ("--json --cpus", 2, "usage", ["--cpus"]),
    ("--json --emit sh a.py", 2, "usage", ["--json", "--emit"]),
    ("--json --instances 9999 a.py", 2, "usage", []),
    ("run --json --profile nosuch a.py", 2, "usage", []),
    ("run --json --profile broken.toml a.py", 2, "usage", []),
    ("torchrun --json --nnodes x a.py", 2, "usage", ["--nnodes"]),
    ("plan --json --sysroot nosuch a.py", 2, "usage", ["--sysroot"]),
    ("plan --json --strict nosuch.py", 125, "failure", ["--strict"]),
    ("plan --json --strict -- nosuch.py", 125, "failure", ["--strict"]),
    ("probe --json --sysroot nosuch", 2, "usage", ["--sysroot"]),
    ("--sysroot nosuch probe --json", 2, "usage", ["--sysroot"]),
    ("--json doctor --no-such", 2, "usage", ["--no-such"]),
    ("--json --instances 2 doctor", 2, "usage", ["--instances"]),
    ("probe --json --svv x.svg", 2, "usage", ["--svv"]),
    ("probe --json=3", 2, "usage", ["--json"]),
    ("probe --json --sysroot", 2, "usage", ["--sysroot"]),
    ("profiles show --json", 2, "usage", []),
    ("profiles show --json nosuch", 2, "usage", []),
    ("--json profile show nosuch", 2, "usage", []),
    ("profiles nosuch --json", 2, "usage", []),
    ("profiles list --json extra", 2, "usage", []),
    ("probe --json --svg no/dir.svg", 125, "failure", ["--svg"]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a program and two profiles, and with an empty environment."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    (tmp_path / "broken.toml").write_text('kind = "intent"\n[settings.smt]\nvalue = 3\n[env.OMP_X]\nvalue = "1"\n')
    (tmp_path / "good.toml").write_text('kind = "intent"\nsummary = "x"\n[settings.smt]\nvalue = true\nreason = "y"\n')
    return tmp_path


@pytest.mark.parametrize(("typed", "code", "kind", "options"), ERRORS, ids=[row[0] for row in ERRORS])
def test_an_error_is_one_object(
    typed: str, code: int, kind: str, options: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(typed.split()) == code
    said = capfd.readouterr()
    assert said.out == ""
    (error,) = json_output.read_messages(said.err)
    assert (error["level"], error["kind"], error["exit_code"], error["options"]) == ("error", kind, code, options)
    assert error["message"].startswith(error["what"])
    assert error["hint"]


@pytest.mark.parametrize("typed", ["plan --json nosuch.py", "--json nosuch.py"])
def test_a_plan_of_a_program_that_cannot_start_has_a_warning(
    typed: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(typed.split()) == 0
    said = capfd.readouterr()
    assert "not found: nosuch" in json_output.read("plan", said.out)["warnings"][0]
    assert said.err == ""


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--json a.py", True),
        ("--cpus 0 --json a.py", True),
        ("a.py --json", False),
        ("--cpus --json a.py", False),
        ("-- a.py --json", False),
        ("plan -m module --json", False),
        ("probe --json", True),
        ("--cpus 0 probe --json", True),
        ("plan run --json", True),
        ("plan train --json", False),
        ("", False),
    ],
)
def test_options_of_the_program_are_not_options_of_cpulaunch(typed: str, expected: bool) -> None:
    assert asks_for_json(typed.split(), canonical=canonical, values=value_count) is expected


def test_a_value_that_looks_like_an_option_is_not_one() -> None:
    error = CpulaunchError("invalid value '--no-x' for --env", value="not --a=b", hint="--env K=V")
    assert error_json(error)["options"] == ["--env"]


@pytest.mark.parametrize(
    ("text", "level", "message", "hint"),
    [
        ("warning: slow: very\nhint: do this", "warning", "slow: very", "do this"),
        ("measuring: 2 backends", "note", "measuring: 2 backends", None),
    ],
)
def test_warnings_and_notes(text: str, level: str, message: str, hint: str | None) -> None:
    made: Any = json_output.checked("message", notice_json(text))
    assert (made["level"], made["message"], made["hint"], made["exit_code"]) == (level, message, hint, None)


@pytest.mark.parametrize("raised", CpulaunchError.__subclasses__())
def test_every_error_has_a_kind_that_the_schema_knows(raised: Callable[..., CpulaunchError]) -> None:
    json_output.checked("message", json.loads(json.dumps(error_json(raised("a\x1b", value=b"\xff", source="\ud8ff")))))


@pytest.mark.parametrize(
    ("file", "code", "errors"), [("good.toml", 0, 0), ("broken.toml", 2, 3), ("nosuch.toml", 2, 1)]
)
def test_the_result_of_validate(
    file: str, code: int, errors: int, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["profiles", "validate", "--json", file]) == code
    said = capfd.readouterr()
    result = json_output.read("profiles-validate", said.out)
    assert (result["file"], result["valid"], result["kind"]) == (file, not code, None if code else "intent")
    assert len(result["errors"]) == errors
    assert said.err == ""
