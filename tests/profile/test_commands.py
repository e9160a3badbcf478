"""profiles list, show and validate."""

import json

import pytest

from cpulaunch.profile.file import read_profile
from cpulaunch.profile.selection import find_profile, presets, user_profiles
from cpulaunch.records.errors import UsageError
from cpulaunch.view.profile_view import list_json, list_text, show_json, show_text, validate_text
from tests import json_output
from tests.profile.hosts import AMX, xeon

EMERALD = xeon(207, *AMX, quota=2.0)
GOOD = 'kind = "intent"\nsummary = "mine"\n[settings.smt]\nvalue = true\nreason = "because"\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.toml").write_text(GOOD)
    (tmp_path / "broken.toml").write_text("nonsense")
    (tmp_path / "notes.txt").write_text("not a profile")
    return str(tmp_path)


def test_the_list_marks_automatic_profiles():
    text = list_text(EMERALD, own=user_profiles(None), width=80)
    marked = [line.split()[1] for line in text.splitlines()[:-1] if line.startswith("*")]
    assert marked == ["container", "xeon-amx"]
    assert all(preset.name in text for preset in presets())
    assert max(map(len, text.splitlines())) <= 80
    assert "Your profiles" not in text


def test_the_list_shows_own_profiles_and_their_errors(folder):
    lines = list_text(EMERALD, own=user_profiles(folder), width=200).splitlines()
    own = lines[lines.index(f"Your profiles ({folder})") + 1 :]
    assert own[0].split(maxsplit=1) == ["broken", f"error: invalid TOML: {own[0].split(': ', 2)[2]}"]
    assert own[1].split() == ["mine", "mine"]


def test_the_list_as_json(folder):
    listed = json_output.read("profiles-list", json.dumps(list_json(EMERALD, own=user_profiles(folder))))
    by_name = {entry["name"]: entry for entry in listed["profiles"]}
    assert listed["schema"] == 1
    assert by_name["xeon-amx"]["auto"] is True
    assert by_name["grace"]["auto"] is False
    assert by_name["mine"] == {
        "name": "mine",
        "kind": "intent",
        "summary": "mine",
        "auto": False,
        "path": f"{folder}/mine.toml",
    }
    assert by_name["broken"]["error"].startswith("invalid TOML")


@pytest.mark.parametrize("name", [preset.name for preset in presets()])
def test_show_explains_every_value(name):
    text = show_text(find_profile(name, config_dir=None), width=80)
    shown = show_json(find_profile(name, config_dir=None))
    flat = " ".join(text.split())
    for choice in (*shown["settings"], *shown["env"]):
        assert choice["reason"] in flat
        assert choice["source"] in flat
        assert choice["date"] in flat
    assert shown["not_for"] in flat
    assert json_output.read("profiles-show", json.dumps(shown)) == shown


def test_show_writes_values_as_typed():
    text = show_text(find_profile("graviton4", config_dir=None), width=80)
    assert "\n  --huge-pages\n" in text
    assert "\n  --openmp default\n" in text
    assert "\n  LRU_CACHE_CAPACITY=1024\n" in text
    assert "models 0xd4f; platforms Amazon EC2" in text
    assert "\n  --no-smt\n" in show_text(find_profile("epyc-zen4", config_dir=None), width=80)
    assert "models 0x10-0x1f, 0xa0-0xaf" in " ".join(
        show_text(find_profile("epyc-zen4", config_dir=None), width=80).split()
    )


def test_show_names_the_file_of_an_own_profile(folder):
    assert f"file       {folder}/mine.toml" in show_text(find_profile("mine", config_dir=folder), width=80)
    assert show_json(find_profile("mine", config_dir=folder))["path"] == f"{folder}/mine.toml"


def test_validate(folder):
    assert (
        validate_text(f"{folder}/mine.toml", read_profile(f"{folder}/mine.toml"))
        == f"{folder}/mine.toml: OK (intent, 1 setting, 0 variables)"
    )
    with pytest.raises(UsageError) as caught:
        validate_text(f"{folder}/broken.toml", read_profile(f"{folder}/broken.toml"))
    assert caught.value.source == f"{folder}/broken.toml, line 1"
