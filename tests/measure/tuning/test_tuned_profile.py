"""The profile that a search writes: that cpulaunch reads it back, and warns where it was not measured."""

import os

import pytest

from cpulaunch.measure.tuning.outcome.tuned_profile import (
    arguments_digest,
    in_profile,
    on_command_line,
    profile_name,
    profile_text,
    shown_program,
)
from cpulaunch.probe import Root, probe_host
from cpulaunch.profile.file import parse_profile
from cpulaunch.profile.provenance import machine_facts, provenance_warning, version_facts
from cpulaunch.profile.selection import profile_warnings
from cpulaunch.records.errors import UsageError
from cpulaunch.view.profile_view import show_json, show_text
from tests import json_output

HOST = probe_host(Root("/"))
CONFIGURATION = {"graph": "onednn", "threads": 1, "huge_pages": True, "instances": 2}
FACTS = machine_facts(HOST) | {"torch": "2.13.0", "program": 'infer.py "a\nb" ' + "x" * 1000, "speedup": "1.31"}


def written(**changes):
    text = profile_text(
        CONFIGURATION, summary="infer.py, tuned", reason="1.31 times", provenance=FACTS | changes, date="2026-11-23"
    )
    return parse_profile(text, name="tuned")


def test_it_is_read_back():
    profile = written()
    assert {each.name: each.value for each in profile.settings} == {
        "graph": "onednn",
        "threads": 1,
        "huge_pages": True,
    }
    assert dict(profile.provenance)["program"].startswith('infer.py "a?b" xxx')
    assert dict(profile.provenance)["date"] == "2026-11-23"


def test_what_no_profile_has_is_for_the_command_line():
    assert on_command_line(CONFIGURATION) == {"instances": 2}
    assert "instances" not in in_profile(CONFIGURATION)


NAMES = {
    "infer.py": "infer-tuned",
    "a/b c,d.py": "b-c-d-tuned",
    "--profile,x=.py": "profile-x-tuned",
    ".hidden": "hidden-tuned",
    "'\"; $(x).py": "x-tuned",
    "...": "program-tuned",
    "gr\u00f6\u00dfe.py": "gr\u00f6\u00dfe-tuned",
    "x" * 300 + ".py": "x" * 60 + "-tuned",
}


@pytest.mark.parametrize("target", NAMES)
def test_its_name_is_one_that_profile_takes(target):
    assert profile_name(target) == NAMES[target]


PROGRAMS = [
    (("a.py", "--token", "hf_SECRET"), f"{os.getcwd()}/a.py"),
    (("-m", "package", "--token=hf_SECRET"), "package"),
    (("--no-python", "serve", "hf_SECRET"), "serve"),
]


@pytest.mark.parametrize(("program", "shown"), PROGRAMS)
def test_arguments_are_told_from_others_but_not_shown(program, shown):
    assert shown_program(program) == shown
    assert arguments_digest(program) != arguments_digest((*program, "more")) != ""
    assert "SECRET" not in arguments_digest(program)
    assert arguments_digest(("a.py",)) == arguments_digest(("-m", "a")) == ""


def test_it_is_shown_with_its_provenance():
    profile = written()
    assert "1.31" in show_text(profile, width=80)
    assert json_output.checked("profiles-show", show_json(profile))["provenance"]["speedup"] == "1.31"


def test_the_machine_it_was_measured_on_needs_no_warning():
    assert provenance_warning(written(**version_facts(HOST)), HOST) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [({"cpu": "Another CPU"}, "the CPU was Another CPU"), ({"threads": "512"}, "the number of threads was 512")],
)
def test_another_machine_gets_a_warning(change, said):
    warning = provenance_warning(written(**version_facts(HOST) | change), HOST)
    assert said in warning
    assert warning.endswith("cpulaunch tune measures again")


def test_a_launch_with_another_version_gets_the_warning(tmp_path):
    path = tmp_path / "tuned.toml"
    path.write_text(
        profile_text({"threads": 1}, summary="s", reason="r", provenance={"cpulaunch": "0.0.1"}, date="2026-11-23")
    )
    (warning,) = profile_warnings((str(path),), HOST, config_dir=None)
    assert "cpulaunch was 0.0.1, is" in warning
    assert profile_warnings(("latency",), HOST, config_dir=None) == ()


@pytest.mark.parametrize("table", ["[provenance]\nsecret = 'x'", "[provenance]\ncpu = 3", "provenance = 3"])
def test_another_provenance_is_refused(table):
    head = "" if "[" in table else f"{table}\n"
    with pytest.raises(UsageError, match="tuned"):
        parse_profile(f'{head}kind = "intent"\nsummary = "s"\n{"" if head else table}\n', name="tuned")
