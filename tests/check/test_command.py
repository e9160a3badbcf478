"""`cpulaunch check`: outputs, exit codes, comments, configuration, notebooks, fixes, and files that are none."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.cli.main import run_command_line
from tests import json_output

if any(importlib.util.find_spec(name) is None for name in ("libcst", "torchfix")):
    pytest.skip("the extra `check` is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SLOW = "from torch import nn\nnet = nn.DataParallel(net)\n"
FIXABLE = """import torch


def train( net,opt ):   # kept as it is
    for x in  loader:
        opt.zero_grad( set_to_none = False )
        net(x).sum().backward( )
        opt.step()
"""


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def check(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run_command_line(["check", *words])
    said = capfd.readouterr()
    return code, said.out, said.err


def test_a_finding_has_place_reason_and_fix(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", SLOW)
    code, out, _ = check(capfd, path)
    assert code == 1
    assert out.startswith(f"{path}:2:7: data-parallel: ")
    assert "    why: " in out
    assert "    fix: " in out


def test_a_program_without_findings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capfd, write(tmp_path, "a.py", "import torch\n"))
    assert (code, out, err) == (0, "0 findings in 1 file\n", "")


@pytest.mark.parametrize("comment", ["ignore", "ignore[data-parallel]", "ignore[zero-grad, data-parallel]"])
def test_a_comment_silences_a_line(comment: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", f"{SLOW.rstrip()}  # cpulaunch: {comment}\n{SLOW}")
    found = json_output.read("check", check(capfd, "--json", path)[1])["findings"]
    assert [each["line"] for each in found] == [4]


@pytest.mark.parametrize("comment", ["ignore[zero-grad]", "ignored", "ignore[]"])
def test_another_comment_does_not(comment: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", f"{SLOW.rstrip()}  # cpulaunch: {comment}\n")
    assert check(capfd, path)[0] == (0 if comment == "ignored" else 1)


def test_a_comment_silences_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", f"# cpulaunch: ignore-file[data-parallel]\n{SLOW}")
    assert check(capfd, path)[0] == 0


def test_configuration_and_options(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", SLOW)
    write(tmp_path, "pyproject.toml", '[tool.cpulaunch.check]\nignore = ["data-parallel"]\n')
    assert check(capfd, path)[0] == 0
    write(tmp_path, "pyproject.toml", '[tool.cpulaunch.check]\nexclude = ["a.py"]\n')
    assert check(capfd, str(tmp_path))[0] == 0
    assert check(capfd, "--select", "zero-grad", path)[0] == 0
    assert check(capfd, "--ignore", "data-parallel", path)[0] == 0
    write(tmp_path, "pyproject.toml", "[tool.cpulaunch.check]\nselected = []\n")
    code, _, err = check(capfd, path)
    assert code == 2
    assert "unknown key" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--select", "data-paralel", "."], "data-parallel"),
        (["--format", "xml", "."], "text|json|sarif|github"),
        ([], "no file or folder"),
        (["--explain", "nothing"], "no such rule"),
    ],
)
def test_invalid_command_lines(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = check(capfd, *words)
    assert code == 2
    assert said in err


def test_explain(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capfd, "--explain", "zero-grad")
    assert code == 0
    assert "# <-" in out


def test_sarif_and_github(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a,b.py", SLOW)
    log = json.loads(check(capfd, "--format", "sarif", path)[1])["runs"][0]
    assert [
        (each["ruleId"], each["locations"][0]["physicalLocation"]["region"]["startLine"]) for each in log["results"]
    ] == [("data-parallel", 2)]
    assert {rule["id"] for rule in log["tool"]["driver"]["rules"]} >= {"data-parallel"}
    line = check(capfd, "--format", "github", path)[1]
    assert line.startswith("::warning file=")
    assert "a%2Cb.py,line=2,col=7" in line


def test_fix_changes_the_finding_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = FIXABLE.replace("\n", "\r\n").replace("kept", "gehört é")
    path = write(tmp_path, "a.py", b"\xef\xbb\xbf" + text.encode())
    os.chmod(path, 0o640)
    code, out, _ = check(capfd, "--fix", path)
    assert (code, "1 fixed" in out) == (0, True)
    wanted = text.replace("( set_to_none = False )", "( )")
    assert Path(path).read_bytes() == b"\xef\xbb\xbf" + wanted.encode()
    assert os.stat(path).st_mode & 0o777 == 0o640


def test_only_unsafe_fixes_change_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "from torch import nn\nnet = nn.Sequential(nn.Linear(2, 2,), nn.BatchNorm1d(2))\n"
    path = write(tmp_path, "a.py", text)
    assert check(capfd, "--fix", path)[0] == 1
    assert Path(path).read_text() == text
    assert check(capfd, "--unsafe-fixes", path)[0] == 0
    assert "nn.Linear(2, 2,bias=False)" in Path(path).read_text().replace(", bias", ",bias")


def test_a_notebook_names_cell_and_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# text"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip list\n", "import torch.nn as nn"]},
        {"cell_type": "code", "source": ["%%bash\n", "for"]},
        {"cell_type": "code", "source": "x = 1\nnet = nn.DataParallel(x)"},
    ]
    path = write(tmp_path, "a.ipynb", json.dumps({"cells": cells, "nbformat": 4}))
    found = json_output.read("check", check(capfd, "--json", path)[1])["findings"]
    assert [(each["cell"], each["line"]) for each in found] == [(4, 2)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.py", b"import torch\nfor\n"),
        ("a.py", b"import torch\n\0"),
        ("a.py", b"# coding: latin-77\nimport torch\n"),
        ("a.py", b"import torch\nx = '\xff'\n"),
        ("a.py", b"import torch\nx = " + b"(" * 5000 + b")" * 5000),
        ("a.py", b"import torch\nx = " + b"-" * 50000 + b"1"),
        ("a.py", b"#" * (5 << 20)),
        ("a.ipynb", b"[]"),
        ("a.ipynb", b"{"),
        ("a.ipynb", b"[" * 200000),
    ],
)
def test_a_file_that_cannot_be_checked_is_said(
    name: str, content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = check(capfd, write(tmp_path, name, content), write(tmp_path, "b.py", SLOW))
    assert code == 2
    assert "not checked" in out
    assert "b.py:2:7: data-parallel" in out
    assert "Traceback" not in err


def test_other_files_and_links(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "round").symlink_to(tmp_path)
    found = json_output.read("check", check(capfd, "--json", str(tmp_path), str(tmp_path / "absent"))[1])
    assert [Path(each["file"]).name for each in found["unreadable"]] == ["loop.py", "pipe.py", "absent"]


@pytest.mark.parametrize("output", ["text", "github", "json", "sarif"])
def test_names_and_code_cannot_write_escapes(output: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a\x1b]0;title\x07\n::error::b.py", SLOW)
    write(tmp_path, "\x1b[2J.py", "import torch\nx = '\x1b[31m\n")
    code, out, err = check(capfd, "--format", output, str(tmp_path))
    assert code == 2
    assert "\x1b" not in out + err
    assert not any(line.startswith("::error::") for line in out.splitlines())


def test_a_file_name_of_odd_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.py"
    Path(os.fsdecode(path)).write_text(SLOW)
    for output in ("text", "github", "json", "sarif"):
        assert check(capfd, "--format", output, str(tmp_path))[0] == 1


def test_the_pages_of_the_rules_are_up_to_date() -> None:
    ran = subprocess.run([sys.executable, ROOT / "scripts/generate-rules", "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
