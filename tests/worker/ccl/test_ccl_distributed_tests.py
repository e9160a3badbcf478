"""torch's own tests of collectives on the CPU: every one that passes with gloo passes with ccl in its place."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ccl_distributed_tests import CANNOT_RUN

if find_spec("torch") is None or find_spec("expecttest") is None:
    pytest.skip("needs torch and expecttest, which torch's tests need: pip install expecttest", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROGRAM = Path(__file__).with_name("ccl_distributed_tests.py")
SECONDS, FEWEST = 900, 95
"""Longest time for each backend, and fewest tests that pass with ccl: with torch 2.13, 99 of 285; most need a GPU."""
ASKS_FOR_GLOO = "test_get_backend"
"""Asserts that the group's backend has the name gloo; here it is ccl, as programs that ask must see."""


def outcomes(backend: str, folder: Path, *names: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(PROGRAM), backend, str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_test_of_torch_that_passes_with_gloo_passes_with_ccl(tmp_path: Path) -> None:
    ccl = outcomes("ccl", tmp_path / "ccl")
    assert sum(outcome == "ok" for outcome in ccl.values()) >= FEWEST
    others = [name for name, outcome in ccl.items() if outcome not in ("ok", CANNOT_RUN)]
    gloo = outcomes("gloo", tmp_path / "gloo", *others)
    passing = {name for name, outcome in gloo.items() if outcome == "ok"} - {ASKS_FOR_GLOO}
    assert {name: ccl[name] for name in passing} == {}
