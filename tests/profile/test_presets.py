"""Every preset is a valid profile file, names its sources, and is in the generated table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cpulaunch
from cpulaunch.profile.file import MAX_BYTES, read_profile
from cpulaunch.profile.model import CONDITIONS
from cpulaunch.profile.schema import APPLIES
from cpulaunch.profile.selection import presets

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path(cpulaunch.__file__).parent / "profiles"
FILES = sorted(FOLDER.glob("*.toml"))
NAMES = {
    *("xeon-skylake", "xeon-icelake", "xeon-amx", "epyc-zen2", "epyc-zen3", "epyc-zen4", "epyc-zen5"),
    *("graviton2", "graviton3", "graviton4", "ampere", "grace", "hybrid-desktop", "container", "gpu-node"),
    *("latency", "throughput", "training"),
}


def test_every_preset_has_a_file():
    assert {path.stem for path in FILES} == NAMES, "NAMES, above, and the files of profiles/ differ"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_preset_is_valid_short_and_sourced(path):
    profile = read_profile(str(path))
    assert path.stat().st_size < MAX_BYTES / 8
    assert profile.not_for
    assert profile.settings
    for choice in (*profile.settings, *profile.env):
        assert choice.source, choice.name
        assert choice.date, choice.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_preset_changes_results(path):
    numerics = {
        "DNNL_DEFAULT_FPMATH_MODE",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "MKL_CBWR",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    }
    profile = read_profile(str(path))
    assert not numerics & {choice.name for choice in profile.env}
    # Beyond rounding: lower precision, other random numbers for augmentation, data sets copied by persistent workers.
    unsafe = {"precision", "flush_denormal", "ipex", "dataloader_workers", "persistent_workers", "mmap_weights"}
    assert not unsafe & {choice.name for choice in profile.settings}
    assert {choice.value for choice in profile.settings if choice.name == "graph"} <= {"onednn"}


def test_the_table_of_presets_equals_the_files():
    from dataclasses import replace

    assert [preset.name for preset in presets()] == [path.stem for path in FILES], "run scripts/generate-presets"
    assert presets() == tuple(replace(read_profile(str(path)), path=None) for path in FILES)


def test_the_table_of_presets_is_as_generated():
    script = REPOSITORY / "scripts" / "generate-presets"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr


def test_every_condition_has_a_check():
    assert set(APPLIES) == set(CONDITIONS)


def test_choosing_among_presets_parses_no_toml():
    code = (
        "import sys\n"
        "from cpulaunch.profile.selection import presets\n"
        "presets()\n"
        "print([name for name in ('tomllib', 're', 'difflib', 'cpulaunch.profile.file') if name in sys.modules])\n"
    )
    # -S: a .pth file of the environment may import re.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert "tomllib" not in done.stdout
    assert "cpulaunch.profile.file" not in done.stdout
