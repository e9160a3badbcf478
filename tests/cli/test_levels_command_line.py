"""-O on command lines: how it is written, and what it does with the profiles of a machine."""

import pytest

from cpulaunch.cli.arguments import parse_command_line
from cpulaunch.cli.help.layout import Page
from cpulaunch.cli.run import read_command_line, request_for
from cpulaunch.cli.usage import help_text
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import replace
from cpulaunch.records.request import LaunchRequest
from tests import json_output
from tests.profile.hosts import AVX512, amd

HOST = amd(0x1A, 0x02, *AVX512, "avx512_bf16", quota=2.0)
"""A Zen 5 server in a container with a CPU quota."""


@pytest.mark.parametrize("torchrun", [False, True])
@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("-O2 a.py", 2),
        ("-O 2 a.py", 2),
        ("-O=2 a.py", 2),
        ("-O0 a.py", 0),
        ("--optimize 3 a.py", 3),
        ("--optimize=4 a.py", 4),
        ("-O2 -O1 a.py", 1),
        ("-t3 -O2 -r 3 a.py", 2),
    ],
)
def test_a_level_is_written_as_for_compilers(words: str, level: int, torchrun: bool) -> None:
    line = parse_command_line(words.split(), interpreter="python", torchrun=torchrun)
    assert line.values["optimize"] == level
    assert line.program is not None
    assert line.program.target == "a.py"


@pytest.mark.parametrize("words", ["-O5 a.py", "-O a.py", "-O-1 a.py", "-Ofast a.py", "-O", "--optimize=x a.py"])
def test_other_levels_are_errors(words: str) -> None:
    with pytest.raises(UsageError, match=r"--optimize.*\nhint: --optimize 0-4"):
        parse_command_line(words.split(), interpreter="python")


def test_the_help_has_a_line_for_each_level() -> None:
    text = help_text("all", Page(width=80))
    lines = [line.strip() for line in text.splitlines()]
    assert {line[:2] for line in lines if line[1:2] == ":"} == {"0:", "1:", "2:", "3:", "4:"}
    assert "  --optimize 0-4            how much may change for speed (also -O2); other" in text


def test_a_level_after_the_program_is_the_programs() -> None:
    line = parse_command_line(["a.py", "-O2"], interpreter="python")
    assert line.values == {}
    assert line.program is not None
    assert line.program.args == ("-O2",)


def request(words: str, environ: dict[str, str] | None = None) -> LaunchRequest:
    environ = {"PYTHON_EXEC": "/py", **(environ or {})}
    return request_for(read_command_line(words.split(), environ), HOST, environ)


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        ("a.py", "container,epyc-zen5"),
        ("-O2 a.py", "container,epyc-zen5"),
        ("-O0 a.py", None),
        ("-O0 --profile auto a.py", "container,epyc-zen5"),
        ("-O0 --profile latency a.py", "latency"),
        ("-O0 --profile epyc-zen4,latency a.py", "epyc-zen4,latency"),
        ("-O1 --profile latency a.py", "latency,container,epyc-zen5"),
    ],
)
def test_level_0_takes_only_named_profiles(words: str, profile: str | None) -> None:
    assert request(words).profile == profile


def test_a_level_is_below_named_profiles_and_above_automatic_ones() -> None:
    merged = request("-O0 --profile latency a.py")
    assert (merged.settings.graph, merged.origin("graph")) == ("onednn", "profile:latency")
    assert (merged.settings.openmp, merged.origin("openmp")) == ("default", "cli -O0")
    merged = request("-O3 --profile latency --weights int4 a.py")
    assert merged.origin("graph") == "profile:latency"
    assert merged.origin("precision") == "cli -O3"
    assert (merged.settings.weights, merged.origin("weights")) == ("int4", "cli")
    assert merged.origin("openmp") == "profile:epyc-zen5"


def test_a_level_makes_no_job_of_a_launch() -> None:
    assert not request("-O3 a.py").distributed
    ranks = request("-O2 --nproc-per-node 2 a.py", {"PET_MAX_RESTARTS": "1"})
    assert ranks.distributed
    assert ranks.origin("graph") == "cli -O2"


def test_a_profile_file_may_choose_a_level(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('kind = "intent"\nsummary = "s"\n[settings.optimize]\nvalue = 2\nreason = "rounding is fine"\n')
    merged = request(f"--profile {path} a.py")
    assert (merged.settings.graph, merged.origin("graph")) == ("onednn", "profile:mine -O2")
    path.write_text(path.read_text().replace("value = 2", "value = 5"))
    with pytest.raises(UsageError, match="from 0 to 4"):
        request(f"--profile {path} a.py")


def test_a_profile_whose_path_looks_like_a_level_is_none() -> None:
    merged = request("-O3 a.py")
    assert merged.is_by_level("precision")
    for name in ("/srv/resnet -Ofast/p.toml", "resnet -O3"):
        named = replace(merged, origins={"optimize": "cli", "precision": f"profile:{name}"})
        assert not named.is_by_level("precision")


def test_json_shows_the_level_and_its_settings(capfd: pytest.CaptureFixture[str]) -> None:
    from cpulaunch.cli.run import run

    assert run(["-O2", "--json", "a.py"], {"HOME": "/nowhere"}, only_plan=True) == 0
    notes = {entry["setting"]: entry for entry in json_output.read("plan", capfd.readouterr().out)["notes"]}
    assert (notes["optimize"]["value"], notes["optimize"]["origin"]) == ("2", "cli")
    assert (notes["graph"]["value"], notes["graph"]["origin"]) == ("onednn", "cli -O2")


def test_a_batch_script_keeps_the_level(capfd: pytest.CaptureFixture[str]) -> None:
    from cpulaunch.cli.run import run

    words = ["-O2", "--nnodes", "2", "--nproc-per-node", "1", "--emit", "slurm", "a.py"]
    assert run(words, {"HOME": "/nowhere", "PATH": "/usr/bin"}, only_plan=True) == 0
    assert "--optimize 2" in capfd.readouterr().out
