"""Random collectives of 2, 3, 4 and 8 ranks, compared with gloo, in sub-groups, with callbacks, stops and kills."""

import os
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

from cpulaunch.worker.ccl.memory.library import LIBRARY
from tests.worker.ccl import stress

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not os.path.isfile(LIBRARY), reason="cpulaunch was installed without a C compiler"),
]
CALLS = int(os.environ.get("TEST_STRESS_CALLS", "500"))


def run(ranks, calls, *fault):
    return stress.main([f"--ranks={ranks}", f"--calls={calls}", f"--seed={ranks}", *fault])


def test_a_short_run_finds_nothing_wrong():
    assert run(3, 60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_result_is_that_of_gloo(ranks):
    assert run(ranks, CALLS) == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_result_is_right_while_ranks_are_stopped(ranks):
    assert run(ranks, CALLS, "--fault=stops") == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fault", ["kill", "timeout"])
def test_no_result_is_wrong_when_a_rank_is_lost(ranks, fault):
    assert run(ranks, 4 * CALLS, f"--fault={fault}") == 0
