"""`cpulaunch check`: outputs, exit codes, comments, configuration, notebooks, fixes, and files that are none."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.check import session
from cpulaunch.check.files import read_configuration
from cpulaunch.check.inspect_text import findings, mentions_torch
from cpulaunch.check.notebooks import notebook
from cpulaunch.check.table import all_rules
from cpulaunch.cli.main import run_command_line
from tests import json_output
from tests.nesting import nested_folders
from tests.strangers import OVERFLOW, UID, as_stranger, folder_of_stranger, in_container, in_user_namespace, needs_root

strangers = pytest.fixture(folder_of_stranger)

if any(importlib.util.find_spec(name) is None for name in ("libcst", "torchfix")):
    pytest.skip("the extra `check` is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SLOW = "from torch import nn; loss.backward()\nnet = nn.DataParallel(net)\n"
FIXABLE = """import torch


def train( net,opt ):   # kept as it is
    for x in  loader:
        mask = torch.ones( 3,4 ).cuda( )
        net(x, mask).sum().backward( )
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


@pytest.mark.parametrize(
    "comment", ["ignore[zero-grad]", "ignore [zero-grad]", "ignored", "ignore-next-line", "ignore-files", "ignore[]"]
)
def test_another_comment_does_not(comment: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", f"{SLOW.rstrip()}  # cpulaunch: {comment}\n")
    assert check(capfd, path)[0] == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("net = nn.Sequential(@\n    nn.Linear(2, 2),\n    nn.BatchNorm1d(2),\n)\n", 0),
        ("net = nn.Sequential(\n    nn.Linear(2, 2),\n    nn.BatchNorm1d(2),\n)@\n", 0),
        ("for net in (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),\n    other):@\n    pass\n", 0),
        ("for net in (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),):\n    pass@\n", 1),
        ("if a:@\n    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))\n", 1),
        ("@@decorated(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))#\ndef f(): pass\n", 0),
    ],
)
def test_a_comment_may_be_on_any_line_of_the_statement(text: str, count: int) -> None:
    comment = "  # cpulaunch: ignore[bias-before-norm]"
    marked = text.replace("@@", "%").replace("@", comment).replace("#\n", f"{comment}\n").replace("%", "@")
    assert len(findings(f"from torch import nn\n{marked}", all_rules().values())) == count


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


@pytest.mark.parametrize("pattern", ["old/*.py", "old", "old/", "old/**", "**/old/**", "*.py", "deep/*.py"])
def test_patterns_of_files_and_folders_to_leave_out(
    pattern: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old/deep").mkdir(parents=True)
    write(tmp_path, "old/deep/a.py" if pattern != "old/*.py" else "old/a.py", SLOW)
    write(tmp_path, "pyproject.toml", f'[tool.cpulaunch.check]\nexclude = ["{pattern}"]\n')
    assert json_output.read("check", check(capfd, "--json", str(tmp_path))[1])["files"] == 0


@pytest.mark.parametrize("pattern", ["old", "**/old/**"])
def test_patterns_do_not_look_above_the_folder_that_is_checked(
    pattern: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old/project/new").mkdir(parents=True)
    write(tmp_path, "old/project/new/a.py", SLOW)
    write(tmp_path, "old/project/pyproject.toml", f'[tool.cpulaunch.check]\nexclude = ["{pattern}"]\n')
    assert json_output.read("check", check(capfd, "--json", str(tmp_path / "old/project"))[1])["files"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.cpulaunch.check]\nselected = []", "unknown key"),
        ("[tool.cpulaunch.check]\nselect = 'zero-grad'", "is a list of words"),
        ("[tool.cpulaunch.check]\nselect = ['none']", "no such rule"),
        ("[tool.cpulaunch.check]\nexclude = ['']", "names nothing"),
        ("[tool.cpulaunch.check]\nexclude = ['.']", "names nothing"),
        ("[tool]\ncpulaunch = 1", "cannot read"),
        (f"[tool.cpulaunch]\ncheck = {'9' * 5000}", "line too long"),
        (f"[tool]\ncpulaunch.check.ignore = ['{'a' * 5000}']", "line too long"),
        (f"[ 'tool' . \"cpulaunch\" . check ]\nignore = ['{'a' * 5000}']", "line too long"),
        (f"tool = {{cpulaunch = {{check = {{ignore = ['{'a' * 5000}']}}}}}}", "line too long"),
        ("a = " + "[\n" * 5000, "cannot read"),
        ("a = '\0'", "cannot read"),
        (f"[tool.cpulaunch.check]\n{'a.' * 40_000}a = 1", "pyproject.toml, line 2"),
        ("[tool.cpulaunch.check]\n" + "# a\n" * 40_000, "more than 128 KiB"),
    ],
)
def test_a_configuration_that_is_invalid(
    text: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "pyproject.toml", text)
    code, _, err = check(capfd, write(tmp_path, "a.py", SLOW))
    assert code == 2
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "text",
    [
        f"keywords = ['{'a' * 4000}']",
        "# comment\n" * 20_000,
        f"dev = ['cpulaunch[check]', '{'a' * 4000}']\n[tool.poetry.dependencies]\ncpulaunch = '*'",
    ],
)
def test_a_long_file_without_a_configuration_is_none(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "pyproject.toml", f"[project]\n{text}")
    assert check(capfd, write(tmp_path, "a.py", SLOW))[0] == 1


def test_a_source_that_takes_too_long_is_not_checked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loop's words are looked for among all nodes."""
    monkeypatch.setattr(session, "MAX_SECONDS", 1)
    loops = "for b in DataLoader(d, **k):\n    net(b).backward()\n    opt.step()\n" * 12_000
    text = f"import torch\nfrom torch.utils.data import DataLoader\nk = dict(batch_size=4)\n{loops}"
    path, other = write(tmp_path, "a.py", text), write(tmp_path, "b.py", SLOW)
    code, out, err = check(capfd, path, other)
    assert code == 2
    assert "a.py: not checked: takes longer than 1 s" in out + err
    assert f"{other}:2:7: data-parallel: " in out


def test_a_source_whose_parsing_takes_too_long_is_not_checked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(text: str) -> ast.AST:
        raise SystemError("AST constructor recursion depth mismatch (before=207, after=227)")

    monkeypatch.setattr(ast, "parse", parse)
    code, out, err = check(capfd, write(tmp_path, "a.py", SLOW))
    assert code == 2
    assert "a.py: not checked: takes longer than 60 s" in out + err


@pytest.mark.parametrize("name", ["a.py", "a.ipynb"])
def test_a_source_that_no_person_has_written_is_not_checked(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Parsed, it takes a thousand times its memory."""
    text = f"import torch\nx = [{'0,' * (1 << 20)}]\n"
    cells = [{"cell_type": "code", "source": text, "metadata": {}, "outputs": [], "execution_count": None}]
    book = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    code, out, err = check(capfd, write(tmp_path, name, book if name.endswith("ipynb") else text))
    assert code == 2
    assert "more than 2 MiB of source" in out + err


def test_a_configuration_at_the_end_of_a_very_large_file_is_said_not_to_be_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "# comment\n" * 500_000 + '[tool.cpulaunch.check]\nexclude = ["*"]\n'
    write(tmp_path, "pyproject.toml", text)
    code, _, err = check(capfd, write(tmp_path, "a.py", SLOW))
    assert code == 1
    assert "pyproject.toml is larger than 4 MiB: a table at its end is not read" in err


def test_deeply_nested_folders_are_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with nested_folders(tmp_path, "a.py"):
        write(tmp_path, "b.py", SLOW)
        code, out, err = check(capfd, str(tmp_path))
    assert (code, err) == (1, "")
    assert "b.py" in out


@needs_root
def test_a_configuration_of_an_owner_without_a_number_is_passed_over(strangers: Path) -> None:
    """As `unshare -r` shows files of root and of all strangers, also that of the folder."""
    project = strangers / "project"
    project.mkdir()
    write(strangers, "pyproject.toml", "[tool.cpulaunch.check]\n")

    def passes_over() -> None:
        said: list[str] = []
        if read_configuration(str(project), said.append) is not None or "another user" not in said[0]:
            raise OSError("it was read")

    in_user_namespace(passes_over)


@needs_root
def test_a_configuration_of_a_user_without_a_number_is_not_the_folders_owners(strangers: Path) -> None:
    """As user 65534 of a container sees the number of all strangers in its own folder, too."""
    project = strangers / "project"
    project.mkdir()
    os.chown(project, OVERFLOW, OVERFLOW)
    os.chown(strangers, 0, 0)
    write(strangers, "pyproject.toml", "[tool.cpulaunch.check]\n")
    os.chown(strangers / "pyproject.toml", UID, UID)
    write(project, "own.toml", "[tool.cpulaunch.check]\n")
    os.chown(project / "own.toml", OVERFLOW, OVERFLOW)

    def reads_only_own() -> None:
        said: list[str] = []
        assert read_configuration(str(project), said.append) is None
        assert "another user" in said[0]
        os.rename(project / "own.toml", project / "pyproject.toml")
        assert read_configuration(str(project), said.append) is not None

    in_container(reads_only_own)


@needs_root
def test_a_configuration_of_another_user_is_passed_over(strangers: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As in /tmp, where anyone may put one above the folders of others."""
    project = strangers / "project"
    project.mkdir()
    write(project, "a.py", SLOW)
    above = '[tool.cpulaunch.check]\nexclude = ["*"]\n'
    as_stranger(lambda: (strangers / "pyproject.toml").write_text(above))
    os.chown(strangers, 0, 0)
    code, out, err = check(capfd, str(project))
    assert (code, "a.py" in out) == (1, True)
    assert f"pyproject.toml is passed over: it belongs to another user (uid {UID})" in err
    assert check(capfd, "--json", str(project))[2].startswith("{")
    os.chown(project, UID, UID)
    assert check(capfd, str(project))[::2] == (0, "")
    os.chown(project, UID + 1, UID + 1)
    os.chown(strangers / "pyproject.toml", 0, 0)
    assert check(capfd, str(project))[::2] == (0, "")


@pytest.mark.parametrize(
    ("folder", "mode", "names", "is_read"),
    [(0o1777, 0o644, 1, True), (0o1777, 0o644, 2, False), (0o1777, 0o666, 1, False), (0o777, 0o666, 1, True)],
)
def test_a_configuration_that_another_user_may_have_linked_is_passed_over(
    tmp_path: Path, folder: int, mode: int, names: int, is_read: bool
) -> None:
    """Its owner is that of the file that was linked; a mount may show all files and folders as writable."""
    path = tmp_path / "pyproject.toml"
    path.write_text("[tool.cpulaunch.check]\n")
    path.chmod(mode)
    for number in range(1, names):
        os.link(path, tmp_path / f"{number}")
    tmp_path.chmod(folder)
    said: list[str] = []
    found = read_configuration(str(tmp_path), said.append)
    assert (found is not None and found[0] == str(path)) == is_read
    assert any("another user may have put it there" in line for line in said) != is_read


def test_a_rule_that_is_off_by_default_can_be_selected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    off = [rule for rule in all_rules().values() if not rule.is_default]
    assert off
    for rule in off:
        path = write(
            tmp_path,
            "a.py",
            f"import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, Dataset\n{rule.wrong[0]}",
        )
        for words, is_found in (((), False), (("--select", rule.id), True), (("--select", "all"), True)):
            found = json_output.read("check", check(capfd, "--json", *words, path)[1])["findings"]
            assert (rule.id in {each["rule"] for each in found}) is is_found
        assert f"--select {rule.id}" in " ".join(check(capfd, "--explain", rule.id)[1].split())


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


def test_files_of_tests_have_no_findings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in ("test", "tests/deep", "src"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("test/test_net.py", "test/run.py", "tests/deep/test_net.py", "src/test_net.py", "test.py"):
        write(tmp_path, name, SLOW)
    found = json_output.read("check", check(capfd, "--json", str(tmp_path))[1])["findings"]
    assert sorted(Path(each["file"]).relative_to(tmp_path).as_posix() for each in found) == [
        *("src/test_net.py", "test.py", "test/run.py")
    ]


@pytest.mark.parametrize("path", [".", "{}", "net/test_net.py", "{}/net/test_net.py"])
def test_folders_above_the_checked_one_do_not_make_a_test(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkout = tmp_path / "tests/checkout"
    (checkout / "net").mkdir(parents=True)
    write(tmp_path, "tests/checkout/net/test_net.py", SLOW)
    monkeypatch.chdir(checkout)
    assert check(capfd, path.format(checkout))[0] == 1
    monkeypatch.chdir("/")
    assert check(capfd, str(checkout))[0] == 1


def test_a_test_that_is_given_by_name_has_no_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    path = write(tmp_path, "tests/test_net.py", SLOW)
    monkeypatch.chdir(tmp_path)
    assert check(capfd, "tests/test_net.py")[0] == check(capfd, path)[0] == 0
    assert check(capfd, "tests")[0] == 1


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


def test_paths_are_written_as_github_matches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a:100%\n.py", SLOW)
    write(tmp_path, "b.py", "import torch\nfor\n")
    monkeypatch.chdir(tmp_path)
    out = check(capfd, "--format", "github", ".")[1].splitlines()
    assert out[0].startswith("::warning file=a%3A100%25%0A.py,line=2,")
    assert out[1].startswith("::error file=b.py::")
    for path, uri in ((".", "a%3A100%25%0A.py"), (str(tmp_path), f"file://{tmp_path}/a%3A100%25%0A.py")):
        result = json.loads(check(capfd, "--format", "sarif", path)[1])["runs"][0]["results"][0]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri


def test_fix_changes_the_finding_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = FIXABLE.replace("\n", "\r\n").replace("kept", "gehört é")
    path = write(tmp_path, "a.py", b"\xef\xbb\xbf" + text.encode())
    os.chmod(path, 0o640)
    code, out, _ = check(capfd, "--fix", path)
    assert (code, "1 fixed" in out) == (0, True)
    wanted = text.replace("torch.ones( 3,4 ).cuda( )", 'torch.ones( 3,4, device="cuda" )')
    assert Path(path).read_bytes() == b"\xef\xbb\xbf" + wanted.encode()
    assert os.stat(path).st_mode & 0o777 == 0o640


def test_fix_keeps_the_mode_whatever_the_umask(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", FIXABLE)
    os.chmod(path, 0o666)
    before = os.umask(0o077)
    try:
        check(capfd, "--fix", path)
    finally:
        os.umask(before)
    assert os.stat(path).st_mode & 0o777 == 0o666


@needs_root
def test_fix_keeps_the_owner(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", FIXABLE)
    os.chown(path, 12345, 23456)
    assert check(capfd, "--fix", path)[0] == 0
    assert (os.stat(path).st_uid, os.stat(path).st_gid) == (12345, 23456)


@needs_root
def test_fix_does_not_follow_a_link_of_another_user(
    tmp_path: Path, strangers: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That user may put it in place of the file after it was read: then its text would be written anywhere."""
    target = write(tmp_path, "of_root.py", FIXABLE)
    as_stranger(lambda: (strangers / "train.py").symlink_to(target))
    code, out, err = check(capfd, "--fix", str(strangers))
    assert (code, Path(target).read_text()) == (2, FIXABLE)
    assert "is a symbolic link of another user" in out + err
    (tmp_path / "own.py").symlink_to(target)
    assert check(capfd, "--fix", str(tmp_path / "own.py"))[0] == 0
    assert Path(target).read_text() != FIXABLE
    assert (tmp_path / "own.py").is_symlink()


@pytest.fixture
def at_fixing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """A function whose argument is called when a text has been read and is about to be changed."""
    from cpulaunch.check import fixes  # It needs libcst.

    fixed = fixes.fixed

    def act_then(action: Callable[[], object]) -> None:
        def acting(*arguments: Any, **options: Any) -> tuple[str, int]:
            action()
            return fixed(*arguments, **options)

        monkeypatch.setattr(fixes, "fixed", acting)

    return act_then


@pytest.mark.parametrize("name", ["a.py", "link.py"])
def test_fix_keeps_what_was_saved_meanwhile(
    name: str,
    tmp_path: Path,
    at_fixing: Callable[[Callable[[], object]], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = Path(write(tmp_path, "a.py", FIXABLE))
    (tmp_path / "link.py").symlink_to("a.py")
    at_fixing(lambda: path.write_text("# saved by an editor\n"))
    code, out, _ = check(capfd, "--fix", str(tmp_path / name))
    assert (code, path.read_text()) == (2, "# saved by an editor\n")
    assert "it has changed since it was read" in out
    assert check(capfd, "--fix", str(tmp_path / name))[0] == 0


@needs_root
def test_fix_writes_no_private_text_where_another_user_can_read_it(
    tmp_path: Path,
    strangers: Path,
    at_fixing: Callable[[Callable[[], object]], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A link to a file of root is read, and is a file of the other user when the text would be written."""
    secret = write(tmp_path, "secret.py", f"{FIXABLE}TOKEN = 1\n")
    os.chmod(secret, 0o600)
    path, mine = strangers / "train.py", strangers / "mine"
    as_stranger(lambda: (mine.write_text("# mine\n"), path.symlink_to(secret)))
    at_fixing(lambda: as_stranger(lambda: mine.rename(path)))
    code, out, _ = check(capfd, "--fix", str(strangers))
    assert (code, path.read_text()) == (2, "# mine\n")
    assert "it has changed since it was read" in out


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nfor x in data:\n    opt.zero_grad(set_to_none=False)\n    net(x).backward()\n    opt.step()\n",
        "import torch\nfor x in data:\n    y = torch.rand(3).cuda()\n",
    ],
)
def test_what_changes_results_is_left_to_unsafe_fixes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    path = write(tmp_path, "a.py", text)
    assert check(capfd, "--fix", path)[0] == 1
    assert Path(path).read_text() == text
    assert check(capfd, "--unsafe-fixes", path)[0] == 0
    assert Path(path).read_text() != text


def test_only_unsafe_fixes_change_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "from torch import nn\nnet = nn.Sequential(nn.Linear(2, 2,), nn.BatchNorm1d(2))\n"
    path = write(tmp_path, "a.py", text)
    assert check(capfd, "--fix", path)[0] == 1
    assert Path(path).read_text() == text
    assert check(capfd, "--unsafe-fixes", path)[0] == 0
    assert "nn.Linear(2, 2, bias=False,)" in Path(path).read_text()


def cell(source: str | list[str]) -> dict[str, Any]:
    return {"cell_type": "code", "source": source}


def notebook_findings(
    folder: Path, capfd: pytest.CaptureFixture[str], cells: list[dict[str, Any]], **rest: Any
) -> list[tuple[int, int]]:
    path = write(folder, "a.ipynb", json.dumps({"cells": cells, "nbformat": 4, **rest}))
    found = json_output.read("check", check(capfd, "--json", path)[1])["findings"]
    return [(each["cell"], each["line"]) for each in found]


@pytest.mark.parametrize(
    "before",
    [
        "!pip install \\\n  this and \\\n  that",
        "%%time\n%matplotlib inline\nx = (10\n  % 3)",
        "files = !ls\n%time print(1)\nhelp?",
        "a = 1\r\nb = 2\rc = 3",
        "%%bash\nfor x in *; do",
        "x = '''\n%d\n?\n'''",
        "this is not Python",
        "\u00a0",
        "",
    ],
)
def test_ipython_syntax_moves_no_finding(before: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cells = [
        cell("from torch import nn"),
        cell(before),
        cell("%%capture\nx = 1\nnet = nn.DataParallel(x)\nnet(x).backward()"),
    ]
    assert notebook_findings(tmp_path, capfd, cells) == [(3, 3)]


def test_a_comment_that_asks_is_no_request_for_help(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = "%time 1\nfrom torch import nn\nfor x in y:  # why?\n    net = nn.DataParallel(x)  # all?\nnet.backward()"
    assert notebook_findings(tmp_path, capfd, [cell(lines)]) == [(1, 4)]


@pytest.mark.parametrize(
    "metadata",
    [
        {"kernelspec": {"language": "julia"}},
        {"kernelspec": {"name": "ir"}, "language_info": {"name": "R"}},
        {"language_info": {"name": "R"}},
    ],
)
def test_a_notebook_of_another_language_has_no_findings(
    metadata: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = {"metadata": metadata}
    assert notebook_findings(tmp_path, capfd, [cell(SLOW)], **other) == []
    path = write(tmp_path, "b.ipynb", json.dumps({"cells": [cell("using torch; end")], **other}))
    assert check(capfd, path)[0] == 0


def test_a_line_of_blanks_in_a_notebook_takes_no_time() -> None:
    lines = ["import torch", " " * 1_000_000 + "$", "a, b = %who", "%time", "x = !ls", "torch?"]
    text = notebook(json.dumps({"cells": [cell("\n".join(lines))], "nbformat": 4})).text
    assert not text.strip()
    lines.pop(1)
    text = notebook(json.dumps({"cells": [cell("\n".join(lines))], "nbformat": 4})).text
    assert [line.split() for line in text.splitlines()] == [
        ["import", "torch"],
        ["a,", "b", "=", "get_ipython()"],
        ["pass"],
        ["x", "=", "get_ipython()"],
        ["pass"],
    ]


@pytest.mark.parametrize("output", ["sarif", "github"])
def test_a_notebooks_cells_are_not_lines_of_its_file(
    output: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "a.ipynb", json.dumps({"cells": [cell(SLOW)]}))
    out = check(capfd, "--format", output, path)[1]
    assert "cell 1, line 2" in out
    assert "line=" not in out
    assert "startLine" not in out


def test_columns_count_characters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", "from torch import nn\nä = '𝄞é'; net = nn.DataParallel(ä)\nnet.backward()\n")
    found = json_output.read("check", check(capfd, "--json", path)[1])["findings"][0]
    assert (found["column"], found["end_column"]) == (17, 35)
    run = json.loads(check(capfd, "--format", "sarif", path)[1])["runs"][0]
    assert run["columnKind"] == "unicodeCodePoints"
    assert run["results"][0]["locations"][0]["physicalLocation"]["region"]["startColumn"] == 17


def test_a_file_is_checked_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.py", SLOW)
    (tmp_path / "b.py").symlink_to("a.py")
    found = json_output.read("check", check(capfd, "--json", path, str(tmp_path), path)[1])
    assert (found["files"], len(found["findings"])) == (1, 1)


def test_only_files_that_may_import_torch_are_parsed() -> None:
    assert not mentions_torch("import tensorflow\nwhät = 1\n")
    assert mentions_torch("import torchvision")
    wide = "import ｔｏｒｃｈ\nx = torch.nn.DataParallel(1)\nx.backward()\n"
    assert [each.line for each in findings(wide, all_rules().values())] == [2]


def test_a_notebook_names_cell_and_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# text"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip list\n", "import torch.nn as nn"]},
        {"cell_type": "code", "source": ["%%bash\n", "for"]},
        {"cell_type": "code", "source": "x = 1\nnet = nn.DataParallel(x)\nnet.backward()"},
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
        ("a.py", b"# coding: undefined\nimport torch\n"),
        ("a.py", b"# coding: rot13\nimport torch\n"),
        ("a.py", b"# coding: punycode\nimport torch-" + b"a" * 3_000_000),
        ("a.py", b"# coding: IDNA" + b"-" * 100_000 + b"\nimport torch\n"),
        ("a.py", b"#" * (5 << 20)),
        ("a.ipynb", b'["torch"]'),
        ("a.ipynb", b'{"torch'),
        ("a.ipynb", b'["torch", ' + b"[" * 200000),
        ("a.ipynb", json.dumps({"cells": [{"cell_type": "code", "source": "import torch\nfor"}]}).encode()),
        ("a.ipynb", json.dumps({"cells": [{"cell_type": "code", "source": "import torch; x = '\ud800'"}]}).encode()),
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
    assert len(out) < 10_000


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
