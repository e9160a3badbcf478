"""Every collective of the backend "ccl", in real programs of two to four ranks, against gloo's results."""

import shutil
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from ccl_ranks import LIBRARY, ROOT, run_checks

if LIBRARY is None or find_spec("torch") is None:
    pytest.skip("torch and oneCCL are not both installed: pip install torch oneccl", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.slow]
CHECKS = "ccl_checks"


NAMES = [*import_module(CHECKS).CHECKS, "end"]
PROGRAMS = [(2, "memory"), (3, "memory"), (4, "memory"), (2, "oneccl"), (3, "oneccl"), (4, "oneccl")]


@cache
def results(size: int, path: str) -> dict[str, str]:
    return run_checks(CHECKS, size, path)


def result(name: str, all_results: dict[str, str]) -> str:
    return all_results.get(name, "ok" if name == "end" else "the program ended before this check")


@pytest.mark.parametrize(("size", "path"), PROGRAMS)
@pytest.mark.parametrize("name", NAMES)
def test_collective(name: str, size: int, path: str) -> None:
    assert result(name, results(size, path)) == "ok"


def test_collectives_without_the_compiled_library_are_left_to_gloo(tmp_path: Path) -> None:
    folder = tmp_path / "installed"
    shutil.copytree(ROOT / "cpulaunch", folder / "cpulaunch", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # Not all checks: gloo promises less, and hangs in some of them.
    names = ("all_reduce_sum_float32", "splits_may_be_given_by_some_ranks_only")
    found = run_checks(CHECKS, 2, "auto", *names, PYTHONPATH=str(folder))
    assert found == {"library": "none"} | dict.fromkeys(names, "ok")
