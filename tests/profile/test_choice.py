"""The selection of presets for a host, and the merging of several profiles."""

import os

import pytest

from cpulaunch.profile.model import matches, specificity
from cpulaunch.profile.selection import (
    chosen_layers,
    chosen_profiles,
    find_profile,
    presets,
    profile_warnings,
    user_profile_dir,
    user_profiles,
)
from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import Layer, merge
from tests.profile.hosts import AMX, AVX512, amd, arm, host, xeon
from tests.strangers import UID, needs_root

USERS = """
kind = "intent"
summary = "mine"
[settings.allocator]
value = "jemalloc"
reason = "measured here"
[env.LRU_CACHE_CAPACITY]
value = "7"
reason = "because"
"""

PICKS = {
    "skylake": (xeon(85, *AVX512), "xeon-skylake"),
    "cascade lake": (xeon(85, *AVX512, "avx512_bf16"), "xeon-skylake"),
    "ice lake": (xeon(106, *AVX512), "xeon-icelake"),
    "ice lake D": (xeon(108, *AVX512), "xeon-icelake"),
    "sapphire rapids": (xeon(143, *AMX), "xeon-amx"),
    "emerald rapids": (xeon(207, *AMX), "xeon-amx"),
    "granite rapids": (xeon(173, *AMX), "xeon-amx"),
    "granite rapids D": (xeon(174, *AMX), "xeon-amx"),
    "AMX in a virtual machine that reports a Rocket Lake": (xeon(167, *AMX), "xeon-amx"),
    "AMX hidden by the hypervisor": (xeon(143, *AVX512), None),
    "sierra forest": (xeon(175, "avx2"), None),
    "rome": (amd(0x17, 0x31, "avx2"), "epyc-zen2"),
    "milan": (amd(0x19, 0x01, "avx2"), "epyc-zen3"),
    "genoa": (amd(0x19, 0x11, *AVX512), "epyc-zen4"),
    "bergamo": (amd(0x19, 0xA0, *AVX512), "epyc-zen4"),
    "turin": (amd(0x1A, 0x02, *AVX512), "epyc-zen5"),
    "turin dense": (amd(0x1A, 0x11, *AVX512), "epyc-zen5"),
    "ryzen 5000": (amd(0x19, 0x21, "avx2"), None),
    "ryzen 7000": (amd(0x19, 0x61, *AVX512), None),
    "graviton 2": (arm(0xD0C, platform="Amazon EC2"), "graviton2"),
    "graviton 3": (arm(0xD40, platform="Amazon EC2"), "graviton3"),
    "graviton 4": (arm(0xD4F, platform="Amazon EC2"), "graviton4"),
    "altra": (arm(0xD0C, platform="GIGABYTE"), "ampere"),
    "ampere one": (arm(0xAC3, vendor="Ampere", platform="Supermicro"), "ampere"),
    "grace": (arm(0xD4F, platform="NVIDIA"), "grace"),
    "grace sold by another": (arm(0xD4F, platform="Supermicro"), "grace"),
    "google axion": (arm(0xD4F, platform="Google"), None),
    "neoverse N1 of unknown make": (arm(0xD0C), None),
    "hybrid laptop": (xeon(0x9A, "avx2", kinds=("performance", "efficiency")), "hybrid-desktop"),
    "one kind of core, named": (xeon(0x9A, "avx2", kinds=("performance", "performance")), None),
    "quota": (amd(0x19, 0x11, *AVX512, quota=4.0), "container,epyc-zen4"),
    "container without a quota": (amd(0x19, 0x11, *AVX512, container=True), "epyc-zen4"),
    "GPU node": (xeon(143, *AMX, gpus=8), "gpu-node,xeon-amx"),
    "GPU pod": (xeon(143, *AMX, gpus=1, quota=8.0), "container,gpu-node,xeon-amx"),
    "nothing known": (host(arch="riscv64"), None),
    "unknown model": (xeon(1), None),
}


@pytest.mark.parametrize("name", PICKS)
def test_auto_selects(name):
    machine, label = PICKS[name]
    assert chosen_layers(("auto",), machine, config_dir=None)[1] == label


@pytest.mark.parametrize("name", PICKS)
def test_no_two_server_presets_fit_equally_well(name):
    machine, _ = PICKS[name]
    servers = [preset for preset in presets() if preset.kind == "server" and matches(preset, machine)]
    counts = [specificity(preset, machine) for preset in servers]
    assert not counts or counts.count(max(counts)) == 1


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("none",), None),
        (("auto", "auto"), "container,xeon-amx"),
        (("throughput",), "throughput,container,xeon-amx"),
        (("latency", "training"), "latency,training,container,xeon-amx"),
        (("auto", "latency"), "container,xeon-amx,latency"),
        (("grace",), "grace"),
        (("throughput", "epyc-zen4"), "throughput,epyc-zen4"),
        (("hybrid-desktop",), "hybrid-desktop,container,xeon-amx"),
    ],
)
def test_named_profiles(names, label):
    machine = xeon(207, *AMX, quota=1.5)
    assert chosen_layers(names, machine, config_dir=None)[1] == label


def test_the_first_profile_has_precedence():
    machine = xeon(207, *AMX, gpus=1)
    layers, label = chosen_layers(("training", "gpu-node"), machine, config_dir=None)
    request = merge(layers, program=None, profile=label, environ={})
    assert (request.settings.grace, request.origin("grace")) == (120.0, "profile:training")
    assert "checkpoint" in request.reasons["grace"]
    assert request.settings.dist_backend == "auto"
    assert not request.distributed
    assert request.origin("openmp") == "profile:xeon-amx"


def test_the_command_line_has_precedence_over_profiles():
    layers, label = chosen_layers(("training",), xeon(207, *AMX), config_dir=None)
    request = merge([Layer(origin="cli", values={"grace": 3.0}), *layers], program=None, profile=label, environ={})
    assert (request.settings.grace, request.origin("grace")) == (3.0, "cli")
    assert "grace" not in request.reasons


def test_variables_of_a_profile_keep_their_reason():
    layers, label = chosen_layers(("auto",), arm(0xD40, platform="Amazon EC2"), config_dir=None)
    request = merge(layers, program=None, profile=label, environ={})
    ((origin, variable),) = request.profile_env
    assert (origin, variable.name, variable.value) == ("profile:graviton3", "LRU_CACHE_CAPACITY", "1024")
    assert variable.reason


def test_a_user_profile_by_name_and_by_path(tmp_path):
    (tmp_path / "mine.toml").write_text(USERS)
    for name in ("mine", str(tmp_path / "mine.toml")):
        layers, label = chosen_layers((name,), xeon(207, *AMX), config_dir=str(tmp_path))
        assert label == "mine,xeon-amx"
        assert layers[0].values == {"allocator": "jemalloc"}
        assert [variable.name for variable in layers[0].env] == ["LRU_CACHE_CAPACITY"]


def test_a_user_profile_has_precedence_over_a_preset(tmp_path):
    (tmp_path / "latency.toml").write_text(USERS)
    assert find_profile("latency", config_dir=str(tmp_path)).summary == "mine"
    assert find_profile("latency", config_dir=None).path is None


@pytest.mark.parametrize(
    ("names", "value", "hint"),
    [
        (("trouhgput",), "'trouhgput'", "did you mean throughput?"),
        (("mime",), "'mime'", "did you mean mine?"),
        (("xyzzy",), "'xyzzy'", "cpulaunch profiles list shows all profiles"),
        (("none", "latency"), "none,latency", "--profile none"),
        (("auto", "./absent.toml"), "./absent.toml: No such file or directory", "give a .toml file"),
    ],
)
def test_invalid_names(tmp_path, names, value, hint):
    (tmp_path / "mine.toml").write_text(USERS)
    with pytest.raises(UsageError) as caught:
        chosen_layers(names, xeon(207, *AMX), config_dir=str(tmp_path))
    assert (caught.value.value, caught.value.hint) == (value, hint)


def test_a_warning_about_a_profile_for_another_machine():
    machine = xeon(207, *AMX)
    (warning,) = profile_warnings(("graviton4",), machine, config_dir=None)
    assert warning.startswith("profile graviton4 is for another machine")
    assert profile_warnings(("auto", "latency"), machine, config_dir=None) == ()
    assert [profile.name for profile in chosen_profiles(("graviton4",), machine, config_dir=None).all] == ["graviton4"]


def test_unknown_facts_match_no_condition():
    grace = find_profile("grace", config_dir=None)
    assert matches(grace, arm(0xD4F, platform="Dell Inc."))
    assert not matches(grace, arm(0xD4F, platform=None))


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/x/cpulaunch/profiles"),
        ({"HOME": "/h"}, "/h/.config/cpulaunch/profiles"),
        ({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}, "/h/.config/cpulaunch/profiles"),
        ({"XDG_CONFIG_HOME": "", "HOME": "/h"}, "/h/.config/cpulaunch/profiles"),
        ({}, None),
    ],
)
def test_the_folder_of_user_profiles(environ, folder):
    assert user_profile_dir(environ) == folder


@pytest.fixture
def strangers_profiles(tmp_path):
    """A folder of profiles in a home that everyone may write, where another user was first to make it."""
    folder = tmp_path / "cpulaunch" / "profiles"
    folder.mkdir(parents=True)
    for name in ("throughput", "mine"):
        (folder / f"{name}.toml").write_text(USERS)
        os.chown(folder / f"{name}.toml", UID, UID)
    os.chown(folder, UID, UID)
    return str(folder)


@needs_root
def test_a_profile_of_another_user_replaces_no_preset(strangers_profiles):
    layers, label = chosen_layers(("throughput",), amd(0x19, 0x11), config_dir=strangers_profiles)
    assert label is not None
    assert "jemalloc" not in [each.values.get("allocator") for each in layers]
    (warning,) = profile_warnings(("throughput",), amd(0x19, 0x11), config_dir=strangers_profiles)
    assert f"{strangers_profiles}/throughput.toml: it belongs to user {UID}" in warning
    assert find_profile("throughput", config_dir=strangers_profiles).path is None


@needs_root
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_nothing_else_of_another_user_replaces_a_preset(strangers_profiles, make):
    """Such as a link to a file that root owns."""
    path = os.path.join(strangers_profiles, "throughput.toml")
    os.unlink(path)
    make(path)
    os.chown(path, UID, UID, follow_symlinks=False)
    assert find_profile("throughput", config_dir=strangers_profiles).path is None


@needs_root
def test_a_profile_behind_a_link_of_another_user_replaces_no_preset(tmp_path):
    (tmp_path / "throughput.toml").write_text(USERS)
    (tmp_path / "link").symlink_to(tmp_path)
    assert find_profile("throughput", config_dir=str(tmp_path / "link")).path is not None
    os.chown(tmp_path / "link", UID, UID, follow_symlinks=False)
    assert find_profile("throughput", config_dir=str(tmp_path / "link")).path is None
    (warning,) = profile_warnings(("throughput",), amd(0x19, 0x11), config_dir=str(tmp_path / "link"))
    assert "link is a symbolic link of another user" in warning


@needs_root
def test_a_profile_of_another_user_is_an_error_by_its_name_and_chosen_by_its_path(strangers_profiles):
    with pytest.raises(UsageError, match="belongs to user"):
        find_profile("mine", config_dir=strangers_profiles)
    assert find_profile(f"{strangers_profiles}/mine.toml", config_dir=strangers_profiles).summary == "mine"
    assert [type(found).__name__ for _, found in user_profiles(strangers_profiles).found] == ["ForeignProfileError"] * 2


@needs_root
def test_a_profile_that_everyone_can_write_replaces_no_preset_and_one_that_a_group_can_does(strangers_profiles):
    path = os.path.join(strangers_profiles, "throughput.toml")
    os.chown(path, 0, 0)
    os.chmod(path, 0o666)
    assert find_profile("throughput", config_dir=strangers_profiles).path is None
    os.chmod(path, 0o664)
    assert find_profile("throughput", config_dir=strangers_profiles).path == path
