"""Random collectives of 2, 3, 4 and 8 ranks, in sub-groups, with callbacks, shared buffers, stops and kills."""

import os
from importlib.util import find_spec

import pytest
from ccl_ranks import HERE, finish, start

if find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

from cpulaunch.worker.ccl.memory.library import LIBRARY

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.isfile(LIBRARY), reason="cpulaunch was installed without a C compiler"),
]
CALLS = int(os.environ.get("TEST_STRESS_CALLS", "1000"))


def run(size, calls, seed, *fault):
    return finish(start(size, [str(HERE / "ccl_stress.py"), str(calls), str(seed), *fault]), 600)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_result_is_right(size):
    results = run(size, CALLS, size)
    assert [(code, out) for code, out, _ in results] == [(0, f"{CALLS}\n")] * size, results


@pytest.mark.parametrize("size", [2, 3])
def test_every_result_is_right_while_ranks_are_stopped(size):
    results = run(size, CALLS // 4, size, "stops")
    assert [(code, out) for code, out, _ in results] == [(0, f"{CALLS // 4}\n")] * size, results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_result_is_wrong_when_a_rank_is_killed(size):
    *survivors, killed = run(size, CALLS // 2, size, "kill")
    assert killed[0] == -9
    for code, out, err in survivors:
        assert (code, "AssertionError" in err) == (1, False), err
        assert out.strip() in ("PeerLostError", "CclError")
