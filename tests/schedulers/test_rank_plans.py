"""One rank's plan: the ranks of a host plan alike, and each takes its own part."""

import pytest

from cpulaunch.cli.arguments import parse_command_line
from cpulaunch.plan.planner import make_plan
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.plan import LaunchPlan
from cpulaunch.records.request import Layer, merge
from cpulaunch.schedulers.layer import scheduler_layer
from cpulaunch.schedulers.task import Machine
from tests.plan.machines import cpuset, machine, taskset
from tests.schedulers.slurm_variables import task, without
from tests.schedulers.test_mpi_and_pbs import open_mpi

HOST = machine(sockets=2, cores=4, smt=2)


def member_plan(environ: dict[str, str], flags: str = "", host=HOST) -> LaunchPlan:
    line = parse_command_line([*flags.split(), "train.py"], interpreter="/venv/bin/python")
    seen = Machine(cpus=len(host.limits.affinity), host_cpus=len(host.limits.cpuset or host.cpus))
    layer = scheduler_layer(environ, line.values, seen)
    assert layer is not None
    layers = [Layer(origin="cli", values=line.values), layer]
    return make_plan(host, merge(layers, program=line.program, profile=None, environ=environ))


def test_ranks_with_one_mask_divide_the_host():
    plans = [member_plan(task(rank, tasks="4(x2)")) for rank in range(8)]
    assert [format_cpulist(plan.workers[0].cpus) for plan in plans] == ["0-1", "2-3", "4-5", "6-7"] * 2
    assert {plan.workers[0].threads for plan in plans} == {2}
    assert {plan.world_size for plan in plans} == {8}


def test_a_rank_with_a_mask_of_its_own_takes_all_of_it():
    bound = task(1, tasks="4", SLURM_CPU_BIND_LIST="0x0303,0x0c0c,0x3030,0xc0c0")
    (worker,) = member_plan(bound, host=taskset(HOST, "2-3,10-11")).workers
    assert (format_cpulist(worker.cpus), worker.threads) == ("2-3", 2)


def test_the_last_ranks_mask_is_its_own_too():
    bound = task(3, tasks="4", SLURM_CPU_BIND_LIST="0x0303,0x0c0c,0x3030,0xc0c0")
    (worker,) = member_plan(bound, host=taskset(HOST, "6-7,14-15")).workers
    assert format_cpulist(worker.cpus) == "6-7"


def test_an_allocation_is_the_budget_that_ranks_divide():
    (worker,) = member_plan(task(1, tasks="2"), host=cpuset(HOST, "4-7,12-15")).workers
    assert format_cpulist(worker.cpus) == "6-7"


def test_a_rank_gets_its_variables():
    plan = member_plan(task(3, tasks="2(x2)"))
    (worker,) = plan.workers
    told = dict(worker.env)
    assert (worker.rank, worker.local_rank, worker.index) == (3, 1, 3)
    assert {name: told[name] for name in told if name.isupper() and ("RANK" in name or "WORLD" in name)} == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
    }
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("n1", "61084")
    assert plan.mode == "ranks"
    assert plan.replaces_launcher


def test_only_a_job_on_one_host_uses_the_loopback():
    assert dict(member_plan(task(0, tasks="2")).workers[0].env)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in dict(member_plan(task(0, tasks="2(x2)")).workers[0].env)


def test_variables_of_torchs_agent_are_unset():
    """With TORCHELASTIC_USE_AGENT_STORE=True every rank would wait for a store that no process serves."""
    inherited = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}
    told = dict(member_plan(task(0, tasks="2") | inherited).workers[0].env)
    assert {name: value for name, value in told.items() if name.startswith("TORCHELASTIC")} == dict.fromkeys(inherited)


def test_mpi_ranks_as_well():
    (worker,) = member_plan(open_mpi(1, 2, 1, 2), "--from-mpi").workers
    assert (worker.rank, format_cpulist(worker.cpus)) == (1, "4-7")


def test_notes_name_the_origin():
    notes = {note.setting: note for note in member_plan(task(1, tasks="2")).notes}
    assert notes["scheduler"].origin == "environment"
    assert "this is rank 1 of 2" in notes["scheduler"].reason
    assert "SLURM_PROCID" in notes["scheduler"].reason
    assert notes["engine"].value == "scheduler"
    assert notes["master_port"].reason.startswith("61000 + (7 x job 12 + step 0) mod 4493")


@pytest.mark.parametrize(
    ("flags", "rank", "show"),
    [
        ("", 2, None),
        ("--show 2", 2, None),
        ("--show 0", 2, frozenset()),
        ("--local-ranks-filter 0", 2, None),
        ("--local-ranks-filter 0", 3, frozenset()),
    ],
)
def test_show_and_filter_apply_to_a_scheduled_rank(flags, rank, show):
    plan = member_plan(task(rank, tasks="2(x2)"), flags)
    assert plan.launch.show == show
    assert plan.replaces_launcher is (show is None)


def test_settings_that_need_a_supervisor_are_errors():
    with pytest.raises(UsageError, match="for ranks that a scheduler starts"):
        member_plan(task(0, tasks="2"), "--report -")


def test_each_host_is_an_agent_where_srun_starts_one_process_on_each():
    plan = member_plan(task(1), "--nproc-per-node numa")
    assert plan.job is not None
    assert (plan.job.engine, plan.job.host_rank, plan.job.rendezvous.endpoint) == ("elastic", 1, "n1:61084")
    assert [worker.rank for worker in plan.workers] == [2, 3]


def test_an_elastic_job_under_slurm():
    plan = member_plan(task(0), "--nnodes 1:2")
    assert plan.job is not None
    assert (plan.job.rendezvous.backend, plan.job.rendezvous.endpoint) == ("c10d", "n1:61084")
    assert plan.job.rendezvous.conf == (("is_host", "true"),)


def test_one_host_is_the_native_engine():
    plan = member_plan(task(0, tasks="1", nodes="n1"), "--nproc-per-node 2")
    assert plan.job is not None
    assert (plan.job.engine, plan.job.master_port) == ("native", None)


def test_an_error_names_its_variable():
    with pytest.raises(UsageError, match="no such host in the job") as caught:
        member_plan(task(1), "--nproc-per-node 2 --node-rank 5")
    assert "--nnodes 2 has hosts 0 to 1" in str(caught.value)


def test_instances_stay_independent():
    assert scheduler_layer(without(task(1), "none"), {"instances": 2}, Machine(cpus=16, host_cpus=16)) is None
