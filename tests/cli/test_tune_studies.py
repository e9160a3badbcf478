"""Which searches go on with each other's trials: those whose figures can be compared, and no others."""

import os
import sys
from pathlib import Path

import pytest

from cpulaunch.cli.arguments import canonical, value_count
from cpulaunch.cli.measuring.services import Services
from cpulaunch.cli.measuring.tune_arguments import parse_tune
from cpulaunch.cli.measuring.tune_search import Planner, study_identity, tuned_program
from cpulaunch.cli.run import check_launch, read_command_line
from cpulaunch.measure.program_source import module_file, source_file


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home directory for all tests, in which a launch remembers what it tried."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def key(tmp_path, home, monkeypatch):
    """A function from a command line of tune, and variables, to the key of its study."""
    monkeypatch.chdir(tmp_path)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("XDG_", "OMP_", "PYTHON"))}
    (tmp_path / "a.py").write_text("print(1)")

    def found(*words, **variables):
        environ = {**kept, "HOME": str(home), **variables}
        services = Services(
            environ=environ,
            parse=lambda tokens: read_command_line(tokens, environ),
            check=lambda line: check_launch(line, environ)[1],
            host_and_plan=lambda line: check_launch(line, environ),
            levels=lambda host: (),
            value_count=lambda name: value_count(canonical(name)),
            print_text=print,
            print_json=print,
            print_help=lambda command: 0,
            notify=print,
            width=80,
            color=False,
        )
        line = parse_tune(words, services.value_count)
        program = tuned_program(line, services, python=sys.executable)
        return study_identity(program, Planner(program, services)).key

    return found


VARY = ("--vary", "threads=1")


def test_the_same_command_line_has_the_same_study(key):
    assert key(*VARY, "a.py") == key(*VARY, "a.py")
    assert key(*VARY, "a.py", WINDOWID="7") == key(*VARY, "a.py")
    assert key(*VARY, "--minutes", "1", "a.py") == key(*VARY, "a.py")


@pytest.mark.parametrize(
    "words",
    [
        ("--lower-is-better",),
        ("--higher-is-better",),
        ("--output", "out.csv"),
        ("--timeout", "9"),
        ("--max-error", "0.1"),
        ("--wall-time",),
        ("--smt",),
        ("--allocator", "default"),
    ],
)
def test_options_that_make_other_figures_have_one_of_their_own(key, words):
    assert key(*VARY, *words, "a.py") != key(*VARY, "a.py")


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "OMP_DYNAMIC", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED"])
def test_so_have_variables_of_the_caller_that_tune_a_program(key, name):
    assert key(*VARY, "a.py", **{name: "1"}) != key(*VARY, "a.py")


def test_so_has_the_content_of_a_profile(key, tmp_path):
    profile = tmp_path / "mine.toml"
    keys = []
    for allocator in ("default", "tcmalloc", "default"):
        profile.write_text(
            f'kind = "intent"\nsummary = "mine"\n[settings.allocator]\nvalue = "{allocator}"\nreason = "why"\n'
        )
        keys.append(key(*VARY, "--profile", "./mine.toml", "a.py"))
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (("a.py",), "a.py"),
        (("-m", "inner"), "inner.py"),
        (("-m", "package"), "package/__main__.py"),
        (("-m", "package.part"), "package/part.py"),
        (("--no-python", "--", "./serve"), "serve"),
    ],
)
def test_so_has_another_text_of_a_script_module_or_command(key, tmp_path, words, file):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("raise SystemExit('imported')")
    path = Path(tmp_path, file)
    keys = []
    for text in ("#!/bin/sh\n", "#!/bin/sh\n#\n"):
        path.write_text(text)
        path.chmod(0o755)
        keys.append(key(*VARY, *words))
    assert keys[0] != keys[1]


def test_what_has_no_source_has_none(tmp_path):
    (tmp_path / "bare").mkdir()
    for name in ("no_such_module", "bare", "sys", "json.nothing", "json.decoder.deeper"):
        assert module_file(name, [str(tmp_path), *sys.path]) is None
    assert module_file("json.decoder", sys.path).endswith("json/decoder.py")
    assert source_file("command", "no-such-command", {"PATH": str(tmp_path)}) is None
