"""Which searches go on with each other's trials: those whose figures can be compared, and no others."""

import os
import sys
from pathlib import Path

import pytest

from cpulaunch.cli.arguments import canonical, value_count
from cpulaunch.cli.measuring.services import Services
from cpulaunch.cli.measuring.tune_arguments import parse_tune
from cpulaunch.cli.measuring.tune_search import Planner, study_identity, tuned_program
from cpulaunch.cli.run import check_launch, read_command_line, with_program
from cpulaunch.measure.program_source import imported_sources, module_file, source_file
from cpulaunch.records.torch_settings import RATE_VARIABLE


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
            resolve=lambda line: with_program(line, environ),
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


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "OMP_DYNAMIC", "PYTHONHASHSEED", "HF_HOME", RATE_VARIABLE])
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
        (("-m", "package.part"), "package/__init__.py"),
        (("--no-python", "--", "./serve"), "serve"),
    ],
)
def test_so_has_another_text_of_a_script_module_or_command(key, tmp_path, words, file):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "package/part.py").write_text("print(1)")
    path = Path(tmp_path, file)
    keys = []
    for text in ("#!/bin/sh\n", "#!/bin/sh\n#\n"):
        path.write_text(text)
        path.chmod(0o755)
        keys.append(key(*VARY, *words))
    assert keys[0] != keys[1]


def test_a_module_of_namespace_packages_is_found_without_importing_them(tmp_path):
    (tmp_path / "outer/inner").mkdir(parents=True)
    (tmp_path / "outer/inner/module.py").write_text("raise SystemExit('imported')")
    assert module_file("outer.inner.module", [str(tmp_path)]) == str(tmp_path / "outer/inner/module.py")
    assert module_file("outer.inner", [str(tmp_path)]) is None


def test_what_has_no_source_has_none(tmp_path):
    (tmp_path / "bare").mkdir()
    for name in ("no_such_module", "bare", "sys", "json.nothing", "json.decoder.deeper"):
        assert module_file(name, [str(tmp_path), *sys.path]) is None
    assert module_file("json.decoder", sys.path).endswith("json/decoder.py")
    assert source_file("command", "no-such-command", {"PATH": str(tmp_path)}) is None


MODULES = {
    "a module beside the script": ("import helper", "helper.py", {}),
    "in a function": ("def f():\n    from helper import thing as other", "helper.py", {}),
    "a part of a package": ("from package import part", "package/part.py", {}),
    "a package that is imported with its part": ("import package.part", "package/__init__.py", {}),
    "a module of a module": ("import package", "package/inner.py", {"package/__init__.py": "from . import inner"}),
    "two dots": (
        "import package.deep.leaf",
        "package/root.py",
        {"package/deep/leaf.py": "from ..root import thing", "package/deep/__init__.py": ""},
    ),
    "a package without __init__": ("from bare.part import thing", "bare/part.py", {}),
    "on PYTHONPATH": ("import elsewhere", "library/elsewhere.py", {}),
    "a circle": ("import helper", "helper.py", {"other.py": "import helper", "third.py": "import other"}),
}


@pytest.mark.parametrize("name", MODULES)
def test_so_has_another_text_of_a_module_that_it_imports(key, tmp_path, name):
    code, changed, others = MODULES[name]
    keys = []
    for number in (1, 2):
        texts = {"package/__init__.py": "", "a.py": code, **others, changed: f"import a\nthing = {number}"}
        for file, text in texts.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
        keys.append(key(*VARY, "a.py", PYTHONPATH=str(tmp_path / "library")))
    assert keys[0] != keys[1]


def test_a_module_that_is_not_imported_changes_nothing(key, tmp_path):
    keys = []
    for text in ("1", "2"):
        (tmp_path / "helper.py").write_text(text)
        keys.append(key(*VARY, "a.py"))
    assert keys[0] == keys[1]


@pytest.mark.parametrize("data", [b"import helper\0", b"import (", b"#!/bin/sh\nexec ./serve\n", b"\xff\xfe"])
def test_what_is_no_python_imports_nothing(tmp_path, data):
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "a.py").write_bytes(data)
    assert imported_sources(str(tmp_path / "a.py"), [str(tmp_path)]) == ()


@pytest.mark.parametrize(
    ("words", "file", "code"),
    [
        (("a.py",), "a.py", "import os; os.environ['MODEL']"),
        (("a.py",), "a.py", 'import os; os.getenv("MODEL", "small")'),
        (("a.py",), "a.py", 'import os; [each for each in os.environ if each.startswith("MOD_")]'),
        (("a.py",), "helper.py", 'NAME = "MODEL"'),
        (("--no-python", "./serve"), "serve", "#!/bin/sh\nexec serve --model ${MODEL:-small}\n"),
    ],
)
def test_so_has_a_variable_that_the_program_names(key, tmp_path, words, file, code):
    (tmp_path / "a.py").write_text("import helper")
    (tmp_path / file).write_text(code)
    (tmp_path / file).chmod(0o755)
    name = "MOD_EL" if "MOD_" in code else "MODEL"
    assert key(*VARY, *words, **{name: "large"}) != key(*VARY, *words)
    assert key(*VARY, *words, **{name: "large"}) == key(*VARY, *words, **{name: "large", "UNNAMED": "1"})


SCRIPT = 'import os; print("_".join(os.environ[name] for name in ("SLURM_JOB_ID", "TMPDIR", "SSH_TTY")))'


@pytest.mark.parametrize("name", ["_", "SLURM_JOB_ID", "TMPDIR", "SSH_TTY"])
def test_another_terminal_or_job_goes_on_with_a_study(key, tmp_path, name):
    (tmp_path / "a.py").write_text(SCRIPT)
    assert key(*VARY, "a.py", **{name: "1"}) == key(*VARY, "a.py", **{name: "2"})


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (("--no-python", "--", "sh", "run.sh"), "run.sh"),
        (("--no-python", "--", "env", "python", "train.py"), "train.py"),
        (("--no-python", "--", "env", "python", "train.py"), "helper.py"),
        (("a.py", "--config=settings.yaml"), "settings.yaml"),
        (("a.py", "settings.toml"), "settings.toml"),
    ],
)
def test_so_has_another_text_of_a_script_or_configuration_among_the_arguments(key, tmp_path, words, changed):
    keys = []
    for text in ("a: 1", "a: 2", "a: 1"):
        (tmp_path / "train.py").write_text("import helper")
        (tmp_path / changed).write_text(text)
        keys.append(key(*VARY, *words))
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


def test_what_the_program_writes_changes_nothing(key, tmp_path):
    keys = []
    for text in ("1", "2"):
        for file in ("out.yaml", "log.txt", "result.json"):
            (tmp_path / file).write_text(text)
        keys.append(key(*VARY, "--output", "out.yaml", "a.py", "out.yaml", "log.txt", "--to=result.json"))
    assert keys[0] == keys[1]


def test_modules_are_read_without_their_warnings(tmp_path, recwarn):
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "a.py").write_text('import helper\npattern = "\\d"\n')
    assert imported_sources(str(tmp_path / "a.py"), [str(tmp_path)]) == (str(tmp_path / "helper.py"),)
    assert not recwarn.list
