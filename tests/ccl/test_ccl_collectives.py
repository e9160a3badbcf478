"""Every collective of the backend "ccl", in real programs of two to four ranks, against gloo's results."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import pytest
from ccl_ranks import LIBRARY, run_checks

if LIBRARY is None or find_spec("torch") is None:
    pytest.skip("torch and oneCCL are not both installed: pip install torch oneccl", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.slow]
CHECKS = "ccl_checks"


@cache
def results(size: int) -> dict[str, str]:
    return run_checks(CHECKS, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", [*import_module(CHECKS).CHECKS, "end"])
def test_result(name: str, size: int) -> None:
    default = "ok" if name == "end" else "the program ended before this check"
    assert results(size).get(name, default) == "ok"
