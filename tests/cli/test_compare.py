"""The command compare: its command line, its exit codes, and real comparisons of programs that end at once."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cpulaunch.cli.measuring.compare_arguments import asks_for_json, parse_compare, side_labels
from cpulaunch.measure.samples import MetricChoice
from cpulaunch.records.errors import UsageError
from tests import json_output
from tests.launch.launching import alive, eventually, inheriting

FIXED = """
    import os, cpulaunch
    cpulaunch.metric("items/s", float(os.environ.get("RATE", "1")))
"""


def test_a_script_alone_compares_python_with_the_defaults():
    line = parse_compare(["infer.py", "--batch", "8", "--", "x"])
    assert (line.sides, line.program) == ((None, ()), ("infer.py", "--batch", "8", "--", "x"))
    assert parse_compare(["--", "-m", "package", "a"]).program == ("-m", "package", "a")
    line = parse_compare(["--rounds", "3", "-m", "package", "-a"])
    assert (line.sides, line.program, line.limits.rounds) == ((None, ()), ("-m", "package", "-a"), 3)
    for words in (
        ["-m", "package", "--", "--epochs", "3"],
        ["--no-python", "./tool", "--", "x"],
        ["--no-python", "python", "train.py", "--", "x"],
    ):
        line = parse_compare(words)
        assert (line.sides, line.program) == ((None, ()), tuple(words))
    line = parse_compare(["--no-python", "--no-python -O2", "--rounds", "20", "--", "./tool"])
    assert line.limits.rounds == 20
    assert (line.sides, line.program) == ((("--no-python",), ("--no-python", "-O2")), ("./tool",))


def test_after_a_double_dash_no_option_of_compare_stands_among_sides():
    """So `3` is no value, and --rounds, which is no side of its own, an argument of a module."""
    words = ["-m", "--rounds", "3", "--", "a.py"]
    assert parse_compare(["--", *words]).program == tuple(words)
    assert parse_compare(words).program == ("a.py",)


@pytest.mark.parametrize("words", [["-m"], ["--no-python"], ["--", "-m"], ["python", "-O2", "--", "-m"], ["-m", "--"]])
def test_a_kind_of_program_without_a_program_is_an_error(words):
    with pytest.raises(UsageError, match="no script given"):
        parse_compare(words)


def test_json_takes_no_file():
    for words in (["--json", "found.json", "a.py"], ["python", "--json", "found.json", "--", "a.py"]):
        with pytest.raises(UsageError, match="--json takes no file: found"):
            parse_compare(words)
    assert parse_compare(["--json", "a.py", "found.json"]).json
    assert parse_compare(["--json", "--html=found.json", "a.py"]).json


def test_sides_come_before_the_two_dashes_and_the_program_behind():
    line = parse_compare(["--json", "python", "-O2", "--instances 2 --env 'A=x y'", "", "--", "infer.py", "--json"])
    assert line.sides == (None, ("-O2",), ("--instances", "2", "--env", "A=x y"), ())
    assert (line.program, line.json) == (("infer.py", "--json"), True)
    assert parse_compare(["--", "--metric x", "cpulaunch", "--", "a.py"]).sides == (("--metric", "x"), ())


def test_one_side_is_compared_with_python():
    assert parse_compare(["-O2", "--", "a.py"]).sides == (None, ("-O2",))


def test_options_before_the_sides_are_those_of_compare():
    words = ["--metric=items/s", "--until", "0.5%", "--rounds", "12", "--budget", "60", "--lower-is-better"]
    line = parse_compare([*words, "--fail-if-slower", "a.py"])
    assert line.choice == MetricChoice(name="items/s", lower_is_better=True)
    assert (line.limits.until, line.limits.rounds, line.limits.budget_seconds) == (0.005, 12, 60)
    assert line.fail_if_slower
    assert parse_compare(["--wall-time", "a.py"]).choice == MetricChoice()
    assert parse_compare(["a.py"]).choice is None


def test_options_of_compare_may_stand_among_the_sides():
    line = parse_compare(
        ["python", "", "--rounds", "12", "-O2", "--json", "--html=p.html", "--", "s.py", "--rounds", "3"]
    )
    assert line.sides == (None, (), ("-O2",))
    assert (line.limits.rounds, line.json, line.files.html) == (12, True, "p.html")
    assert line.program == ("s.py", "--rounds", "3")
    assert parse_compare(["python", "-h", "--", "s.py"]).help
    assert asks_for_json(["python", "--rounds", "12", "--json", "--wrong", "--", "s.py"])
    assert not asks_for_json(["python", "", "--", "s.py", "--json"])
    assert not asks_for_json(["s.py", "--json"])


def test_behind_two_dashes_there_are_sides_only():
    assert parse_compare(["--", "--rounds 3", "--wall-time", "--", "s.py"]).sides == (
        ("--rounds", "3"),
        ("--wall-time",),
    )


WRONG = {
    "python --rounds -- a.py": "--rounds needs a value",
    "python --rounds 3 a.py": "no -- between the sides and the program",
    "python --rounds 3 x -- a.py": "a side is neither options nor python",
    "python --wall-time --metric x -- a.py": "exclude each other",
    "": "no script given",
    "--json": "no script given",
    "python -O2": "no -- between the sides and the program",
    "python -O2 --": "no script given",
    "python a.py -- b.py": "a side is neither options nor python",
    "--until 2 a.py": "invalid value '2' for --until",
    "--until 100% a.py": "invalid value",
    "--rounds 0 a.py": "invalid value",
    "--rounds 201 a.py": "invalid value",
    "--budget nan a.py": "invalid value",
    "--metric ( a.py": "invalid value",
    "--metric": "--metric needs a value",
    "--json=1 a.py": "--json takes no value",
    "--metric x --wall-time a.py": "exclude each other",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_command_line_is_a_usage_error(words):
    with pytest.raises(UsageError) as error:
        parse_compare(words.split())
    assert WRONG[words] in str(error.value)


def test_labels_hide_values_that_env_gives_and_number_what_is_equal():
    sides = [None, ("--env", "TOKEN=secret", "--env=KEY=secret", "--env", "OMP_DYNAMIC=true"), (), None]
    hidden = [frozenset({"TOKEN", "KEY"})] * 4
    assert side_labels(sides, hidden) == [
        "python",
        "--env TOKEN=... --env=KEY=... --env OMP_DYNAMIC=true",
        "cpulaunch",
        "python #2",
    ]


@pytest.fixture
def compare(tmp_path):
    """A function that runs `cpulaunch compare` on a program's text."""

    def run(*words, code=FIXED, program=("program.py",)):
        (tmp_path / "program.py").write_text(textwrap.dedent(code))
        command = [sys.executable, "-m", "cpulaunch", "compare", *words, *program]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)

    return run


def test_a_difference_that_is_there_is_found(compare):
    ran = compare("--json", "python", "--env RATE=3", "--")
    data = json_output.read("compare", ran.stdout)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert data["comparisons"][0]["ratio"] == 3
    assert (data["comparisons"][0]["verdict"], data["ended"], len(data["rounds"])) == ("better", "precise", 9)
    assert [side["plan"] is None for side in data["sides"]] == [True, False]


@pytest.mark.slow
def test_text_for_people(compare):
    ran = compare("--env RATE=2", "--env RATE=1 --instances 2 --oversubscribe", "--env RATE=0.5", "--")
    first, second, *rest = ran.stdout.splitlines()
    assert (ran.returncode, ran.stderr) == (0, "")
    text = " ".join(ran.stdout.split())
    assert "--env RATE=... --instances 2 --oversubscribe is 1.00 times as fast as --env RATE=..." in text
    assert "--env RATE=... #2 is slower than --env RATE=...: 0.25 times as fast" in text
    assert "RATE=2" not in ran.stdout
    assert all(len(line) <= 80 for line in [first, second, *rest])


@pytest.mark.slow
def test_exit_code_1_for_a_slower_side_on_request(compare):
    words = ("--env RATE=2", "--env RATE=1", "--")
    assert compare(*words).returncode == 0
    assert compare("--fail-if-slower", *words).returncode == 1
    assert compare("--fail-if-slower", *reversed(words[:2]), "--").returncode == 0


def test_a_side_that_fails_is_named_with_its_message(compare):
    code = "import os, sys; sys.exit('no rate' if 'RATE' not in os.environ else 0)"
    ran = compare("python", "--env RATE=1", "--", code=code)
    assert ran.returncode == 1
    assert "python failed in its first launch: it exited with code 1: no rate" in " ".join(ran.stdout.split())


def test_a_python_of_one_side_is_not_that_of_the_others(compare, tmp_path):
    other = tmp_path / "other-python"
    other.write_text(f'#!/bin/sh\nexport OTHER=3\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    code = "import os, cpulaunch; cpulaunch.metric('items/s', float(os.environ.get('OTHER', '1')))"
    ran = compare("--json", "--rounds", "1", f"--python {other}", "python", "", "--", code=code)
    assert [each["ratio"] for each in json.loads(ran.stdout)["comparisons"]] == pytest.approx([1 / 3, 1 / 3], abs=1e-6)


WRONG_SIDES = {
    "--no-such-option": "unknown option",
    "--instances 99999": "99999",
    "--dry-run": "a side with --dry-run starts nothing",
    "--report x.json": "a side takes no --report",
    "--metric 'x ([0-9])'": "a side takes no --metric",
    "other.py": "a side is neither options nor python",
    "-O2 other.py": "a side names a program of its own",
    "--emit sh": "a side with --emit starts nothing",
}


@pytest.mark.parametrize("side", WRONG_SIDES)
def test_sides_are_checked_before_anything_is_launched(compare, tmp_path, side):
    ran = compare("python", side, "--", code="open('launched', 'w')")
    assert WRONG_SIDES[side] in ran.stderr
    assert ran.returncode in (2, 125)
    assert not (tmp_path / "launched").exists()


def test_errors_are_json_with_json(compare):
    ran = compare("--json", "--until", "2")
    assert json_output.read_messages(ran.stderr)[-1]["kind"] == "usage"


def test_sides_of_different_metrics_cannot_be_compared(compare):
    code = "import os, cpulaunch; cpulaunch.metric(os.environ.get('NAME', 'a'), 1)"
    ran = compare("python", "--env NAME=b", "--", code=code)
    assert (ran.returncode, "no metric in common: python: a; --env NAME=...: b" in ran.stderr) == (2, True)


def test_a_comparison_whose_rounds_all_failed_is_a_failure(compare):
    ran = compare("--rounds", "2", code="import cpulaunch; cpulaunch.metric('items/s', 0)")
    assert (ran.returncode, "no round was completed" in ran.stdout) == (1, True)


LONG = """
    import os, time
    with open("pid.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.part", f"pid-{os.getpid()}")
    if len([name for name in os.listdir() if name.startswith("pid-")]) > 4:
        time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_what_it_launched(tmp_path, number):
    (tmp_path / "program.py").write_text(textwrap.dedent(LONG))
    command = [sys.executable, "-m", "cpulaunch", "compare", "program.py"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pids = eventually(lambda: _running(tmp_path), "the fifth launch")
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    eventually(lambda: not any(alive(pid) for pid in pids), "the end of the launch")
    eventually(lambda: not os.listdir(tmp_path / "tmp"), "the removal of its files")
    if number == signal.SIGKILL:
        return
    assert process.returncode == 130
    assert b"no verdict: cpulaunch was " in out
    assert b"ended by a signal" in out


@pytest.mark.parametrize("descriptors", [50, 53, 55, 57])
def test_descriptors_that_run_out_are_no_failure_of_a_side(tmp_path, descriptors):
    (tmp_path / "program.py").write_text("")
    (tmp_path / "tmp").mkdir()
    prefix = inheriting(descriptors, "-n 64")
    command = [*prefix, sys.executable, "-m", "cpulaunch", "compare", "--rounds", "1", "--wall-time", "program.py"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (125, "hint: ulimit -n 4096")
    assert "Traceback" not in done.stderr
    assert not os.listdir(tmp_path / "tmp")


def _running(folder: Path) -> list[int]:
    pids = [int(path.name[4:]) for path in folder.glob("pid-*")]
    return [pid for pid in pids if alive(pid)] if len(pids) > 4 else []


def test_the_json_of_an_interrupted_comparison_is_whole(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(LONG))
    command = [sys.executable, "-m", "cpulaunch", "compare", "--json", "program.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    eventually(lambda: _running(tmp_path), "the fifth launch")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert json_output.checked("compare", json.loads(out))["ended"] == "interrupted"


def test_a_page_and_pictures_of_a_comparison(compare, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'cpulaunch[plots]'")
    files = ["--html", "page.html", "--svg", "plots.svg", "--png", "plots.png"]
    ran = compare("python", "--env RATE=3 --env API_KEY=secret-value", *files, "--")
    assert ran.returncode == 0, ran.stderr
    assert [line.split(":")[1].strip() for line in ran.stderr.splitlines()] == ["page", "picture", "picture"]
    page = (tmp_path / "page.html").read_text()
    assert "3.00 times as fast" in page
    assert "API_KEY" in page
    assert "secret-value" not in page
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "plots.svg").read_bytes().startswith(b"<?xml")
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--html", "--svg", "--png"])
def test_a_file_that_cannot_be_written_is_found_before_the_first_launch(compare, tmp_path, option):
    if option != "--html":
        pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'cpulaunch[plots]'")
    ran = compare(option, "missing/file", "--", code="open('started', 'w')")
    assert ran.returncode == 125
    assert "cannot be written: missing/file" in ran.stderr
    assert not (tmp_path / "started").exists()


def test_a_side_has_no_page_of_its_own(compare):
    ran = compare("python", "--html x.html", "--")
    assert ran.returncode == 2
    assert "a side takes no --html" in ran.stderr
    assert "give it to compare: --html FILE" in ran.stderr


def test_a_comparison_that_fails_has_a_page(compare, tmp_path):
    ran = compare("--html", "page.html", "python", "", "--", code="raise SystemExit(3)")
    assert ran.returncode == 1
    assert "No verdict: no round was completed." in (tmp_path / "page.html").read_text()


def test_a_pipe_that_the_program_puts_in_place_of_the_page_is_replaced(compare, tmp_path):
    """Else the comparison would wait for a reader, for ever."""
    code = "import os; os.path.exists('page.html') or os.mkfifo('page.html'); raise SystemExit(3)"
    assert compare("--html", "page.html", "python", "", "--", code=code).returncode == 1
    assert (tmp_path / "page.html").is_file()


def test_a_pipe_that_was_there_before_gets_the_page(compare, tmp_path):
    os.mkfifo(tmp_path / "page.html")
    reader = subprocess.Popen(["cat", "page.html"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert compare("--html", "page.html", "python", "", "--", code="raise SystemExit(3)").returncode == 1
    assert "No verdict" in reader.communicate(timeout=60)[0]
