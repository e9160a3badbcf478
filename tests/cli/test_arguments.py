"""The command line as a table: tokens -> what they mean, or the error they give."""

import pytest

from cpulaunch.cli.arguments import parse_command_line
from cpulaunch.cli.help.layout import Page
from cpulaunch.cli.usage import help_text
from cpulaunch.records.errors import UsageError
from cpulaunch.records.settings import setting_specs


def parse(*tokens: str):
    return parse_command_line(tokens, interpreter="python")


@pytest.mark.parametrize(
    ("tokens", "values"),
    [
        (["--instances", "2", "a.py"], {"instances": 2}),
        (["--instances=auto", "a.py"], {"instances": "auto"}),
        (["--cores_per_instance", "4", "a.py"], {"cores_per_instance": 4}),
        (["--cores_per-instance=4", "a.py"], {"cores_per_instance": 4}),
        (["--cpus", "0-2,8", "a.py"], {"cpus": frozenset({0, 1, 2, 8})}),
        (["--smt", "a.py"], {"smt": True}),
        (["--no-smt", "a.py"], {"smt": False}),
        (["--no_e_cores", "a.py"], {"e_cores": False}),
        (["--smt", "--no-smt", "a.py"], {"smt": False}),
        (["--huge-pages=true", "a.py"], {"huge_pages": True}),
        (["--env", "A=1", "--env=B=x y=z", "a.py"], {"env": (("A", "1"), ("B", "x y=z"))}),
        (["--env", "A=", "a.py"], {"env": (("A", ""),)}),
        (["--profile", "throughput,./p.toml", "a.py"], {"profile": ("throughput", "./p.toml")}),
        (["--show", "none", "a.py"], {"show": frozenset()}),
        (["--show", "0,2", "a.py"], {"show": frozenset({0, 2})}),
        (["--grace", "0.5", "a.py"], {"grace": 0.5}),
        (["--dist-backend", "auto", "a.py"], {"dist_backend": "auto"}),
        (["--ccl_workers=2", "--ccl-worker-siblings", "a.py"], {"ccl_workers": 2, "ccl_worker_siblings": True}),
        (["--ccl-path", "oneccl", "a.py"], {"ccl_path": "oneccl"}),
    ],
)
def test_settings(tokens, values):
    line = parse(*tokens)
    assert line.values == values
    assert line.program is not None
    assert line.program.target == "a.py"


@pytest.mark.parametrize(
    ("tokens", "kind", "target", "args"),
    [
        (["a.py", "--instances", "2", "--help", "-m"], "script", "a.py", ("--instances", "2", "--help", "-m")),
        (["-m", "pkg.mod", "x", "--json"], "module", "pkg.mod", ("x", "--json")),
        (["-m", "--instances", "2", "pkg.mod", "x"], "module", "pkg.mod", ("x",)),
        (["--no-python", "--threads=1", "ls", "-l"], "command", "ls", ("-l",)),
        (["--no_python", "ls"], "command", "ls", ()),
        (["--", "--odd name.py", "--"], "script", "--odd name.py", ("--",)),
        (["-"], "script", "-", ()),
        (["a b.py", "$x", "*", "", "new\nline"], "script", "a b.py", ("$x", "*", "", "new\nline")),
    ],
)
def test_arguments_after_the_program_are_passed_to_it(tokens, kind, target, args):
    program = parse(*tokens).program
    assert program is not None
    assert (program.kind, program.target, program.args) == (kind, target, args)
    assert program.interpreter == ("" if kind == "command" else "python")


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (["--instanses", "2", "a.py"], ["unknown option: --instanses", "did you mean --instances"]),
        (["-n", "2", "a.py"], ["unknown option: -n"]),
        (["--no-cpus", "a.py"], ["unknown option: --no-cpus"]),
        (["--instances"], ["--instances needs a value", "hint: --instances N|auto"]),
        (
            ["--instances", "0", "a.py"],
            ["invalid value '0' for --instances: expected a whole number of at least 1, or auto"],
        ),
        (["--instances", "two", "a.py"], ["invalid value 'two'", "--instances N|auto"]),
        (["--instances", "1_0", "a.py"], ["expected a whole number"]),
        (["--threads", "٢", "a.py"], ["expected a whole number"]),
        (["--grace", "1_0", "a.py"], ["expected a number"]),
        (["--cpus", "3-1", "a.py"], ["malformed CPU list part '3-1'"]),
        (["--cpus", "", "a.py"], ["expected a list"]),
        (["--cpus", "0-3,2-5", "a.py"], ["invalid value '0-3,2-5' for --cpus: 2-3 is listed twice"]),
        (["--show", "0,0", "a.py"], ["for --show: 0 is listed twice"]),
        (["--cpus", "0-99999999999", "a.py"], ["99999999999 is above the largest id, 16384"]),
        (["--env", "NOVALUE", "a.py"], ["expected NAME=VALUE"]),
        (["--env", "=1", "a.py"], ["expected NAME=VALUE"]),
        (["--strategy", "scatter", "a.py"], ["expected one of spread, compact"]),
        (["--dist-backend", "nccl", "a.py"], ["expected one of auto, gloo, ccl, mpi"]),
        (["--ccl-workers", "-1", "a.py"], ["expected a whole number of at least 0"]),
        (["--grace", "nan", "a.py"], ["expected a finite number"]),
        (["--grace", "-1", "a.py"], ["expected a finite number"]),
        (["--json=yes", "a.py"], ["--json takes no value: --json=yes"]),
        (["--smt=maybe", "a.py"], ["--smt takes no value: --smt=maybe", "--smt or --no-smt"]),
        (["--emit", "bat", "a.py"], ["invalid value 'bat' for --emit: expected one of sh, slurm, k8s"]),
        (["-m", "--no-python", "x"], ["-m and --no-python exclude each other"]),
        (["--odd\nname", "a.py"], ["unknown option: --odd\\nname"]),
        (["--json=\x1b[31m\n", "a.py"], ["--json=\\x1b[31m\\n"]),
        (["--emit", "sh", "--json", "a.py"], ["--json and --emit exclude each other"]),
    ],
)
def test_an_invalid_command_line_is_an_error_of_two_lines(tokens, parts):
    with pytest.raises(UsageError) as caught:
        parse(*tokens)
    text = str(caught.value)
    assert "\nhint: " in text
    assert len(text.splitlines()) == 2
    for part in parts:
        assert part in text
    assert caught.value.exit_code == 2


def test_a_plan_needs_no_program():
    assert parse("--instances", "2").program is None


def test_help_names_every_setting():
    text = help_text("all", Page(width=80))
    for spec in setting_specs().values():
        assert f"\n  {spec.negative_flag if spec.default is True else spec.flag}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_defaults_are_valid_values():
    for spec in setting_specs().values():
        if isinstance(spec.default, str) and spec.value_type.choices:
            assert spec.value_type.from_text(spec.default) == spec.default
