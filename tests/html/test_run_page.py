"""The page of a run: what it says, and that no text of a worker or profile can become more than text."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.html.elements.markup import MAX_ROWS, number_text, table
from cpulaunch.html.run_page import run_page
from tests.html import hostile
from tests.html.reader import Reader


def make_page(report: dict[str, Any]) -> str:
    return run_page(report, machine="a machine")


@pytest.mark.parametrize("text", hostile.ATTACKS, ids=range(len(hostile.ATTACKS)))
def test_text_of_others_stays_text(text: str) -> None:
    page = make_page(hostile.report(text))
    seen, expected = Reader(page), Reader(make_page(hostile.report()))
    assert seen.elements == expected.elements
    assert [name for name, _ in seen.attributes] == [name for name, _ in expected.attributes]
    assert all(each.isprintable() or each == "\n" for each in page)
    assert len(page) < 250_000


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e308, 1e308, 0.0, 10**400])
def test_every_number_has_a_bar_of_finite_length(number: float) -> None:
    styles = [value for name, value in Reader(make_page(hostile.report(number=number))).attributes if name == "style"]
    lengths = [float(part.partition(":")[2].removesuffix("%")) for style in styles for part in str(style).split(";")]
    assert lengths
    assert all(0 <= length <= 100 for length in lengths)


@pytest.mark.parametrize(
    ("change", "tone", "sentence"),
    [
        ({}, "good", "Succeeded after 1.5 s."),
        (
            {"exit_code": 3, "end": (3, None)},
            "bad",
            "Failed with exit code 3 after 1.5 s: worker 1 ended with exit code 3.",
        ),
        ({"exit_code": 137, "end": (None, 9)}, "bad", "worker 1 was killed by signal 9."),
        ({"exit_code": 130, "wall_seconds": None}, "bad", "Failed with exit code 130."),
    ],
)
def test_the_verdict_comes_first(change: dict[str, Any], tone: str, sentence: str) -> None:
    report = hostile.report()
    code, number = change.pop("end", (0, None))
    report["workers"][1] |= {"exit_code": code, "signal": number}
    page = make_page(report | change)
    assert f'<p class="verdict {tone}">' in page
    assert sentence in Reader(page).text
    assert page.index(sentence) < page.index("<h2>")


def test_what_was_seen_while_it_ran_is_there() -> None:
    finding = {"rule": "throttled", "workers": [], "text": "the CPU quota held it back", "fix": "a larger quota"}
    text = Reader(make_page(hostile.report() | {"findings": [finding]})).text
    assert all(each in text for each in ("What made it slow", "the launch", *list(finding.values())[2:]))
    assert "What made it slow" not in Reader(make_page(hostile.report() | {"findings": []})).text


@pytest.mark.parametrize(
    ("captured", "state", "sentence"),
    [
        (2, "degraded", "Not in force everywhere: graph (2 graphs captured, 1 module not)."),
        (0, "degraded", "Not in force: graph (0 graphs captured, 1 module not)."),
        (2, "applied", "Every setting is in force."),
    ],
)
def test_a_part_that_stayed_eager_does_not_deny_the_others(captured: int, state: str, sentence: str) -> None:
    report = hostile.report()
    entry = report["workers"][0]["graph"]["captured"][0]
    report["workers"] = [
        report["workers"][0]
        | {
            "settings": {"graph": {"state": state, "detail": "a part runs eagerly"}},
            "graph": {"captured": [entry] * captured, "eager": [{"module": "Part", "reason": "a branch"}]},
            "binding": None,
        }
    ]
    assert sentence in Reader(make_page(report)).text


def test_a_page_of_no_workers() -> None:
    report = hostile.report() | {"workers": [], "metrics": {}}
    report["plan"]["workers"] = []
    assert "Succeeded after 1.5 s." in Reader(make_page(report)).text


def test_a_page_of_thousands_of_workers_stays_small() -> None:
    report = hostile.report()
    worker, plan = report["workers"][0], report["plan"]["workers"][0]
    entry = worker["graph"]["captured"][0]
    report["workers"] = [
        worker
        | {
            "index": index,
            "warnings": [f"{index} {'x' * 500}"],
            "graph": {"captured": [entry | {"module": f"m{index}"}], "eager": [{"module": f"e{index}", "reason": ""}]},
            "settings": {f"s{index}": {"state": "degraded", "detail": "d"}},
        }
        for index in range(2000)
    ]
    report["plan"]["workers"] = [plan | {"index": index, "env": {"V": f"value {index}"}} for index in range(2000)]
    report["metrics"] = {f"metric {number}": {"sum": 1.0, "values": [1.0] * 2000} for number in range(100)}
    page = make_page(report)
    assert len(page) < 1_500_000
    assert all(text in page for text in ("88 more metrics", "1,968 more values", "1,801 more are", "1,988 more."))


def test_a_table_says_what_it_leaves_out() -> None:
    text = Reader(table("Rows", ["Number"], ([number] for number in range(MAX_ROWS + 5)))).text
    assert f"{MAX_ROWS - 1}5 more rows are left out." in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1625.0, "1,625"), (3.14159, "3.142"), (True, ""), ("3", ""), (float("nan"), "nan"), (1e300, "1e+300")],
)
def test_numbers_have_about_four_digits(value: object, text: str) -> None:
    assert number_text(value) == text


def launched(folder: Path, *arguments: str, program: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "cpulaunch", *arguments, "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("program", "code", "sentence"),
    [
        ("print('done')", 0, "Succeeded"),
        ("raise SystemExit(3)", 3, "Failed with exit code 3"),
        (f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})", 137, "was killed by signal 9"),
        (f"import os\nos.kill(os.getpgid(0), {int(signal.SIGINT)})", None, "Failed with exit code"),
    ],
)
def test_a_launch_ends_with_its_page(program: str, code: int | None, sentence: str, tmp_path: Path) -> None:
    done = launched(tmp_path, "--html", "page.html", "--report", "r.json", program=program)
    if code is not None:
        assert done.returncode == code
    assert sentence in Reader((tmp_path / "page.html").read_text()).text
    assert json.loads((tmp_path / "r.json").read_text())["exit_code"] == done.returncode
    assert "cpulaunch: page: page.html" in done.stderr


def test_ctrl_c_leaves_a_page(tmp_path: Path) -> None:
    program = "import sys\nprint('started', flush=True)\nsys.stdin.read()"
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "cpulaunch", "--html", "page.html", "program.py"]
    child = subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        child.send_signal(signal.SIGINT)
        child.wait(timeout=60)  # With its input open: at the end of that, the program would end by itself.
    assert child.returncode == 130
    assert "Failed with exit code 130" in Reader((tmp_path / "page.html").read_text()).text


def test_a_page_that_cannot_be_written_is_found_before_the_launch(tmp_path: Path) -> None:
    done = launched(tmp_path, "--html", "missing/page.html", program="print('started')")
    assert done.returncode == 125
    assert "the page cannot be written: missing/page.html" in done.stderr
    assert "started" not in done.stdout


def test_a_page_is_for_its_owner_and_hides_values(tmp_path: Path) -> None:
    done = launched(tmp_path, "--env", "API_KEY=secret-value", "--html", "page.html", program="pass")
    assert done.returncode == 0
    page = tmp_path / "page.html"
    assert os.stat(page).st_mode & 0o777 == 0o600
    assert "API_KEY" in page.read_text()
    assert "secret-value" not in page.read_text()
