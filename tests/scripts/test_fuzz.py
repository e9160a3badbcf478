"""scripts/fuzz: it tries inputs, and keeps those that fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzzing.targets import CpulaunchError, Target, run

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz"


def test_a_short_run_finds_nothing(tmp_path):
    command = [sys.executable, str(FUZZ), "--random", "--minutes", "0.005", "--target", "counts"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "counts: " in done.stdout
    assert "nothing found" in done.stdout


def raising(error, errors=(CpulaunchError,)):
    def check(data):
        raise error

    return Target(check=check, seeds=(b"",), errors=errors)


def test_what_is_as_promised_is_no_finding():
    run(raising(CpulaunchError("malformed", value="x", hint="y")), b"")


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        (raising(KeyError("x")), KeyError, "x"),
        (raising(CpulaunchError("")), AssertionError, "an empty message"),
        (raising(ValueError("one\ntwo"), errors=(ValueError,)), AssertionError, "more than a hint"),
        (raising(ValueError("\x1b[2J"), errors=(ValueError,)), AssertionError, "control characters"),
        (raising(ValueError("x" * 5000), errors=(ValueError,)), AssertionError, "a message of 5000 characters"),
    ],
)
def test_what_is_not_as_promised_is_found(target, kind, message):
    with pytest.raises(kind, match=message):
        run(target, b"")


def test_what_takes_long_is_found():
    with pytest.raises(AssertionError, match="it took"):
        run(raising(CpulaunchError("malformed")), b"", max_seconds=0.0)
