"""The cores of oneCCL's threads, and where they are an error or left out."""

import pytest

from cpulaunch.plan.planner import make_plan
from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import SchedulerRank
from tests.plan.machines import TORCH, cpuset, lines, machine, plan, quota, replace, request_of
from tests.plan.plugin.test_collectives import FAILED, MIXED, ONE, RANKS, SMT, TWO, ccl, env, measured_plan, note


@pytest.mark.parametrize(
    ("host", "flags", "workers", "affinity"),
    [
        (TWO, f"{RANKS} --ccl-workers 1", ["0: 0-2 preferred:0 t3", "1: 4-6 preferred:1 t3"], "3,7"),
        (TWO, f"{RANKS} --ccl-workers 2", ["0: 0-1 preferred:0 t2", "1: 4-5 preferred:1 t2"], "2,3,6,7"),
        (
            TWO,
            "--nproc-per-node 4 --ccl-workers 1",
            [f"{i}: {2 * i} preferred:{i // 2} t1" for i in range(4)],
            "1,3,5,7",
        ),
        (TWO, "--nproc-per-node 1 --ccl-workers 2", ["0: 0-2,4-6 interleave:0-1 t6"], "3,7"),
        (SMT, f"{RANKS} --ccl-workers 1", ["0: 0 preferred:0 t1", "1: 2 preferred:1 t1"], "1,3"),
        (SMT, f"{RANKS} --ccl-workers 1 --smt", ["0: 0,4 preferred:0 t2", "1: 2,6 preferred:1 t2"], "1,3"),
        (
            SMT,
            f"{RANKS} --ccl-workers 1 --ccl-worker-siblings",
            ["0: 0-1 preferred:0 t2", "1: 2-3 preferred:1 t2"],
            "5,7",
        ),
        (
            SMT,
            f"{RANKS} --ccl-workers 2 --ccl-worker-siblings",
            ["0: 0-1 preferred:0 t2", "1: 2-3 preferred:1 t2"],
            "4,5,6,7",
        ),
        (cpuset(TWO, "1-6"), f"{RANKS} --ccl-workers 1", ["0: 1-2 preferred:0 t2", "1: 4-5 preferred:1 t2"], "3,6"),
        (
            TWO,
            f"{RANKS} --ccl-workers 1 --dataloader-workers 1",
            ["0: 0-1 preferred:0 t2 l3", "1: 4-5 preferred:1 t2 l7"],
            "2,6",
        ),
    ],
)
def test_oneccl_threads_get_cores_of_the_ranks(host, flags: str, workers: list[str], affinity: str) -> None:
    made = plan(host, flags)
    assert lines(made) == workers
    variables = ccl(made)
    assert variables["CCL_WORKER_AFFINITY"] == affinity
    assert variables["CCL_WORKER_OFFLOAD"] == "1"
    assert int(variables["CCL_WORKER_COUNT"] or 0) * len(made.workers) == len(affinity.split(","))
    assert variables["CPULAUNCH_CCL_PATH"] == "oneccl"
    assert env(made)["OMP_NUM_THREADS"] == str(made.workers[0].threads)
    assert "no compute threads" in note(made, "ccl_workers").reason
    assert sorted(cpu for worker in made.workers for cpu in worker.ccl_cpus) == list(map(int, affinity.split(",")))
    assert not any(worker.ccl_cpus & (worker.cpus | worker.loader_cpus) for worker in made.workers)
    assert not made.warnings


@pytest.mark.parametrize(
    ("host", "flags", "error", "hint"),
    [
        (ONE, "--nproc-per-node 1 --ccl-workers 1", "no core left", "fewer ranks"),
        (TWO, f"{RANKS} --ccl-workers 4", "no core left", "--ccl-workers 3"),
        (TWO, "--nproc-per-node 9 --ccl-workers 1", "cores of their own", "drop --ccl-workers"),
        (quota(TWO, 4), f"{RANKS} --ccl-workers 1", "cores of their own", "drop --ccl-workers"),
        (TWO, f"{RANKS} --ccl-workers 1 --binder none", "cores of their own", "drop --ccl-workers"),
        (TWO, f"{RANKS} --ccl-workers 1 --ccl-worker-siblings", "too few free SMT siblings", "--ccl-worker-siblings"),
        (SMT, f"{RANKS} --smt --ccl-workers 1 --ccl-worker-siblings", "too few free SMT siblings", "--smt"),
        (SMT, "--nproc-per-node 8 --ccl-workers 1 --ccl-worker-siblings", "too few free SMT siblings", "--smt"),
        (SMT, f"{RANKS} --ccl-worker-siblings", "needs --ccl-workers", "--ccl-workers N"),
        (TWO, "--ccl-workers 1", "needs ranks", "--nproc-per-node N"),
        (TWO, "--instances 2 --ccl-workers 1", "needs ranks", "--nproc-per-node N"),
        (TWO, f"{RANKS} --ccl-workers 1 --dist-backend gloo", "no collectives run on oneCCL", "--dist-backend ccl"),
        (TWO, f"{RANKS} --ccl-workers 1 --dist-backend mpi", "no collectives run on oneCCL", "--dist-backend ccl"),
    ],
)
def test_missing_cores_are_an_error(host, flags: str, error: str, hint: str) -> None:
    with pytest.raises(UsageError, match=error) as caught:
        plan(host, flags)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("host", "flags"), [(ONE, "--nproc-per-node 1"), (quota(TWO, 4), RANKS), (TWO, f"{RANKS} --dist-backend gloo")]
)
def test_threads_of_a_profile_are_optional(host, flags: str) -> None:
    made = plan(host, flags, profile={"ccl_workers": 1})
    assert lines(made) == lines(plan(host, flags))
    assert note(made, "ccl_workers").value == "0"
    assert "CCL_WORKER_COUNT" not in env(made)


@pytest.mark.parametrize("variable", ["CCL_WORKER_OFFLOAD", "CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"])
def test_user_variables_disable_the_threads_of_a_profile(variable: str) -> None:
    flags, wanted = f"{RANKS} --dist-backend ccl", {"ccl_workers": 1}
    for made in (
        plan(TWO, flags, profile=wanted, environ={variable: "1"}),
        plan(TWO, f"{flags} --env {variable}=1", profile=wanted),
    ):
        assert lines(made) == lines(plan(TWO, RANKS))
        assert (note(made, "ccl_workers").value, note(made, "ccl_workers").reason) == (
            "0",
            f"not applied: you set {variable}",
        )
        assert "CPULAUNCH_CCL_PATH" not in env(made)
    typed = plan(TWO, f"{flags} --ccl-workers 1", environ={variable: "7"})
    assert env(typed)[variable] != "7"


def test_each_sibling_belongs_to_one_rank() -> None:
    wide = replace(machine(cores=1, smt=4), torch=TORCH)
    made = plan(wide, f"{RANKS} --ccl-workers 1 --ccl-worker-siblings")
    cpus = [cpu for worker in made.workers for cpu in (*worker.cpus, *worker.ccl_cpus)]
    assert sorted(cpus) == [0, 1, 2, 3]


def test_a_rank_bound_by_a_scheduler_uses_its_own_siblings() -> None:
    scheduled_rank = SchedulerRank(rank=1, world_size=2, local_rank=1, local_world_size=2, host_rank=0, own_cpus=True)
    request = replace(request_of("--standalone --ccl-workers 1 --ccl-worker-siblings"), scheduled_rank=scheduled_rank)
    (worker,) = make_plan(cpuset(SMT, "2-3,6-7"), request).workers
    assert (worker.cpus, worker.ccl_cpus) == (frozenset((2, 3)), frozenset((7,)))


def test_threads_are_left_out_if_gloo_is_faster() -> None:
    flags = f"{RANKS} --dist-backend auto --ccl-workers 1"
    assert "CCL_WORKER_COUNT" in env(plan(TWO, flags))
    made = measured_plan(MIXED, flags)
    assert (lines(made), ccl(made)) == (lines(plan(TWO, RANKS)), {})
    assert note(made, "ccl_workers").reason == "not applied: gloo was faster here"
    failed = note(measured_plan(FAILED, flags), "ccl_workers")
    assert failed.reason == "not applied: the measurement failed (CclError: oneCCL is not installed)"
