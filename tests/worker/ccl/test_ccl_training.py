"""Training over the backend "ccl", by the common ways to train, with the losses of gloo."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import pytest
from ccl_ranks import LIBRARY, run_checks

if LIBRARY is None or find_spec("torch") is None:
    pytest.skip("torch and oneCCL are not both installed: pip install torch oneccl", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.slow]
CHECKS = "ccl_training"


@cache
def results(size: int, path: str) -> dict[str, str]:
    return run_checks(CHECKS, size, path)


@pytest.mark.parametrize(("size", "path"), [(2, "memory"), (3, "memory"), (2, "oneccl"), (3, "oneccl")])
@pytest.mark.parametrize("name", [*import_module(CHECKS).CHECKS, "end"])
def test_training(name: str, size: int, path: str) -> None:
    default = "ok" if name == "end" else "the program ended before this check"
    assert results(size, path).get(name, default) == "ok"
