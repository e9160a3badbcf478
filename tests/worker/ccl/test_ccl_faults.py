"""Faults of ranks with the backend "ccl": the other ranks fail in time, and no shared memory is left behind."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from ccl_ranks import HERE, LIBRARY, ROOT, environment, finish, free_port, start

from tests.worker.applying import without_gloo

if LIBRARY is None or find_spec("torch") is None:
    pytest.skip("torch and oneCCL are not both installed: pip install torch oneccl", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROGRAM = str(HERE / "ccl_faulty.py")
KILLED, DEADLINE_SECONDS = -9, 180
"""The deadline only ends tests that hang."""


both_paths = pytest.mark.parametrize("path", ["memory", "oneccl"])


def run(fault, path, size=2):
    ranks = start(size, [PROGRAM, fault], CPULAUNCH_CCL_PATH=path, TEST_STORE_PORT=str(free_port()))
    return ranks, finish(ranks, DEADLINE_SECONDS)


def shared_memory_of(ranks):
    mine = tuple(f"{rank.pid}:" for rank in ranks)
    return [name for name in os.listdir("/dev/shm") if name.startswith(mine)]


@both_paths
@pytest.mark.parametrize("fault", ["dies_before", "dies_within", "leaves"])
@pytest.mark.parametrize("size", [2, 3])
def test_other_ranks_fail_when_a_rank_exits(fault, size, path):
    ranks, results = run(fault, path, size)
    code, out, _ = results[0]
    assert code == 1
    assert "PeerLostError: rank " in out
    assert f"(process {ranks[1].pid}) exited" in out or size > 2
    assert results[1][0] == (0 if fault == "leaves" else KILLED)
    assert shared_memory_of(ranks) == []


def test_other_ranks_fail_when_a_rank_dies_during_setup():
    ranks, results = run("dies_during_setup", "oneccl")
    assert [code for code, _, _ in results] == [1, KILLED]
    assert f"PeerLostError: rank 1 of the group (process {ranks[1].pid}) exited" in results[0][2]
    assert shared_memory_of(ranks) == []


def test_all_ranks_get_the_reason_why_one_cannot_load_oneccl():
    _, results = run("cannot_load", "oneccl", size=3)
    assert [code for code, _, _ in results] == [1, 1, 1]
    for _, _, err in results:
        assert "UnavailableError: rank 1: oneCCL cannot be loaded: libccl of this test is missing" in err


@both_paths
def test_training_fails_when_a_rank_dies(path):
    ranks, results = run("dies_in_backward", path)
    code, out, err = results[0]
    assert code == 1, err
    # The bucket in flight fails, or the next one, because the group is broken.
    assert f"rank 1 of the group (process {ranks[1].pid}) exited" in out
    assert shared_memory_of(ranks) == []


@both_paths
def test_a_collective_fails_after_the_timeout_of_the_group(path):
    ranks, results = run("late", path)
    assert results[0][0] == 1
    assert "PeerLostError" in results[0][1]
    assert " 1 s" in results[0][1]
    assert shared_memory_of(ranks) == []


@both_paths
def test_a_call_can_have_its_own_timeout(path):
    ranks, results = run("own_timeout", path)
    assert results[0][0] == 1
    assert " within 1 s: " in results[0][1] + results[0][2]
    assert shared_memory_of(ranks) == []


@both_paths
def test_killed_ranks_leave_no_shared_memory(path):
    ranks, results = run("all_die", path)
    assert [code for code, _, _ in results] == [KILLED, KILLED]
    assert shared_memory_of(ranks) == []


@both_paths
def test_an_interrupt_ends_a_collective(path):
    ranks = start(2, [PROGRAM, "interrupted"], CPULAUNCH_CCL_PATH=path)
    code, out, _ = finish(ranks[:1], DEADLINE_SECONDS)[0]
    finish(ranks[1:], 1)
    assert code == -2 or code == 130 or code == 1
    assert "KeyboardInterrupt" in out


@both_paths
def test_a_collective_in_a_forked_child_raises_and_the_parent_continues(path):
    _, results = run("forked", path)
    assert "child: this process was forked after init_process_group" in results[0][1]
    assert [code for code, _, _ in results] == [0, 0]


def test_other_ranks_fail_after_a_rank_was_interrupted():
    from torch.distributed import AllreduceOptions

    if not hasattr(AllreduceOptions(), "asyncOp"):
        pytest.skip("this torch does not report synchronous calls: a thread completes a call that was interrupted")
    ranks, results = run("interrupted_and_continues", "memory")
    assert results[0][1] == "went on\n"
    assert results[1][0] == 1
    assert f"PeerLostError: rank 0 of the group (process {ranks[0].pid}) left the group" in results[1][1]


def test_a_group_can_be_recreated_over_the_same_store():
    _, results = run("recreated", "memory")
    assert [(code, out) for code, out, _ in results] == [(0, "fine\n")] * 2


def test_other_ranks_fail_after_a_rank_aborted_the_group():
    ranks, results = run("aborted", "memory")
    assert results[0][0] == 1
    assert f"PeerLostError: rank 1 of the group (process {ranks[1].pid}) left the group" in results[0][1]


@both_paths
def test_a_rank_that_ends_first_runs_what_it_has_called(path):
    _, results = run("ends_with_a_pending_call", path)
    assert [result[:2] for result in results] == [(0, ""), (0, "0.0\n")]


@both_paths
def test_a_handler_at_exit_may_call_collectives(path):
    _, results = run("calls_at_exit", path)
    assert [result[:2] for result in results] == [(0, "8.0\n")] * 2


@both_paths
def test_a_group_is_destroyed_in_spite_of_a_pending_collective_that_fails(path):
    ranks, results = run("destroyed", path)
    assert results[0][:2] == (0, "destroyed: True\n")
    if path == "memory":  # In oneCCL the abandoned call goes on in rank 0, and completes.
        assert f"PeerLostError: rank 0 of the group (process {ranks[0].pid}) left the group" in results[1][1]


def test_ranks_use_the_memory_path_if_the_kernel_permits_it():
    _, results = run("permitted", "auto")
    assert [(code, out) for code, out, _ in results] == [(0, "in memory\n")] * 2


def test_ranks_use_gloo_if_the_kernel_forbids_the_memory_path():
    _, results = run("forbidden", "auto")
    assert [(code, out) for code, out, _ in results] == [(0, "over gloo\n")] * 2
    assert sum("ccl uses gloo: the kernel does not permit ranks" in err for _, _, err in results) == 1


def test_a_requested_memory_path_that_is_forbidden_is_an_error():
    _, results = run("forbidden", "memory")
    assert [code for code, _, _ in results] == [1, 1]
    assert all("CPULAUNCH_CCL_PATH is memory, but the kernel does not permit" in err for _, _, err in results)


def test_an_unknown_path_is_an_error():
    _, results = run("fine", "shm", size=1)
    assert results[0][0] == 1
    assert "CPULAUNCH_CCL_PATH is shm: it must be one of auto, memory, oneccl" in results[0][2]


@both_paths
def test_two_concurrent_programs_do_not_interfere(path):
    programs = [start(2, [PROGRAM, "fine"], CPULAUNCH_CCL_PATH=path) for _ in range(2)]
    for ranks in programs:
        assert [(code, out) for code, out, _ in finish(ranks, DEADLINE_SECONDS)] == [(0, "fine\n")] * 2


@pytest.mark.root
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to mount a small /dev/shm")
def test_all_ranks_get_the_error_for_too_little_shared_memory_of_one():
    line = f"mount -t tmpfs -o size=10m none /dev/shm && exec {sys.executable} {PROGRAM} fine"
    commands = [sys.executable, PROGRAM, "fine"], ["unshare", "--mount", "sh", "-c", line]
    common = environment(2, free_port()) | {"CPULAUNCH_CCL_PATH": "oneccl"}
    ranks = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    for code, _, err in finish(ranks, DEADLINE_SECONDS):
        assert code == 1
        assert "rank 1: /dev/shm is too small for oneCCL: 10 MiB free, 52 MiB needed by 2 ranks" in err


UNEDITED = """
import sys
import torch.distributed as dist, torch
assert "CCL" not in dist.Backend._plugins
assert "cpulaunch.worker.ccl.oneccl.library" not in sys.modules
dist.init_process_group("{backend}", rank=0, world_size=1, store=dist.HashStore())
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
"""


@pytest.mark.parametrize("backend", ["ccl", "CCL", "cpu:ccl"])
def test_a_program_that_names_ccl_gets_it_without_an_import(tmp_path, backend):
    script = tmp_path / "program.py"
    script.write_text(UNEDITED.format(backend=backend))
    process = launch([str(script)])
    assert without_gloo(process.stdout) == f"{backend.lower()} [1.0, 1.0]\n", process.stderr


def test_a_program_that_names_gloo_gets_gloo(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(UNEDITED.format(backend="gloo") + "assert 'CCL' not in dist.Backend._plugins\n")
    assert without_gloo(launch([str(script)]).stdout) == "gloo [1.0, 1.0]\n"


def launch(arguments):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CPULAUNCH", "OMP_", "CCL_"))}
    return subprocess.run(
        [sys.executable, "-m", "cpulaunch", *arguments],
        env=kept | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
