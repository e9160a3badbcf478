"""Slurm's variables -> a layer, as a table."""

import pytest

from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import SchedulerRank
from cpulaunch.schedulers.layer import scheduler_layer
from cpulaunch.schedulers.task import FIRST_PORT, PORTS, Machine
from tests.schedulers.slurm_variables import BIG, task, without

PORT = FIRST_PORT + 7 * 12 % PORTS


def layer(environ, machine=BIG, **chosen):
    return scheduler_layer(environ, chosen, machine)


def values(environ, machine=BIG, **chosen):
    found = layer(environ, machine, **chosen)
    return None if found is None else dict(found.values)


# One task per host: every process is a host


def test_rank_0_is_on_the_first_host():
    assert values(task(1), nproc_per_node=4) == {
        "scheduler": "slurm",
        "nnodes": (2, 2),
        "node_rank": 1,
        "master_addr": "n1",
        "master_port": PORT,
        "rdzv_id": "slurm-12.0",
    }


def test_several_tasks_are_a_job_by_default():
    assert values(task(0))["nnodes"] == (2, 2)


def test_every_value_names_its_variable():
    found = layer(task(1))
    assert found.origin == "environment"
    assert set(found.reasons) == set(found.values)
    for name, variable in [
        ("nnodes", "SLURM_STEP_NUM_NODES"),
        ("node_rank", "SLURM_NODEID"),
        ("master_addr", "SLURM_STEP_NODELIST"),
        ("master_port", "7 x job 12 + step 0"),
    ]:
        assert variable in found.reasons[name]


def test_one_host_needs_no_rendezvous():
    alone = task(0, tasks="1", nodes="n1")
    assert values(alone, nproc_per_node="numa") == {"scheduler": "slurm", "nnodes": (1, 1)}


def test_an_elastic_job_has_its_store_on_the_first_host():
    found = values(task(1), nnodes=(1, 2))
    assert found["rdzv_backend"] == "c10d"
    assert found["rdzv_endpoint"] == f"n1:{PORT}"
    assert found["rdzv_conf"] == (("is_host", "false"),)
    assert values(task(0), nnodes=(1, 2))["rdzv_conf"] == (("is_host", "true"),)


def test_a_requested_rendezvous_endpoint_is_kept():
    found = values(task(1), rdzv_backend="c10d", rdzv_endpoint="head:29500")
    assert "rdzv_endpoint" not in found
    assert found["nnodes"] == (2, 2)
    assert "rdzv_endpoint" not in values(task(1), rdzv_backend="etcd-v2")


def test_master_variables_of_the_environment_are_used():
    found = values(task(1) | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "4000"})
    assert (found["master_addr"], found["master_port"]) == ("10.1.1.1", 4000)
    with pytest.raises(UsageError, match="MASTER_PORT is not a port number"):
        values(task(1) | {"MASTER_PORT": "70000"})


@pytest.mark.parametrize(
    "chosen",
    [
        {"standalone": True},
        {"nnodes": (2, 2), "rdzv_endpoint": "head:29500", "rdzv_backend": "c10d"},
        {"nnodes": (2, 2), "node_rank": 1, "master_addr": "head"},
        {"scheduler": "none"},
        {"instances": 2},
        {"cores_per_instance": 2, "instances": "auto"},
    ],
    ids=str,
)
def test_a_complete_command_line_is_not_changed(chosen):
    assert layer(task(1), **chosen) is None


def test_one_srun_per_host_is_complete():
    alone = task(0, tasks="1", nodes="n2")
    assert layer(alone, nnodes=(2, 2), node_rank=1, master_addr="n1", nproc_per_node=2) is None


def test_nnodes_that_conflicts_with_slurm_is_an_error():
    with pytest.raises(UsageError, match="--nnodes 4 conflicts with srun") as caught:
        layer(task(0), nnodes=(4, 4))
    assert "it started processes on 2 hosts (SLURM_STEP_NUM_NODES)" in str(caught.value)


# Several tasks per host: every process is a rank


@pytest.mark.parametrize(
    ("rank", "tasks", "scheduled_rank"),
    [
        (0, "2", SchedulerRank(rank=0, world_size=2, local_rank=0, local_world_size=2, host_rank=0)),
        (3, "2(x2)", SchedulerRank(rank=3, world_size=4, local_rank=1, local_world_size=2, host_rank=1)),
        (1, "2,1", SchedulerRank(rank=1, world_size=3, local_rank=1, local_world_size=2, host_rank=0)),
        (2, "2,1", SchedulerRank(rank=2, world_size=3, local_rank=0, local_world_size=1, host_rank=1)),
        (4, "1,4", SchedulerRank(rank=4, world_size=5, local_rank=3, local_world_size=4, host_rank=1)),
    ],
)
def test_ranks(rank, tasks, scheduled_rank):
    assert layer(task(rank, tasks=tasks)).scheduled_rank == scheduled_rank


def test_master_addr_of_ranks():
    one, two = values(task(1, tasks="2", nodes="n1")), values(task(3, tasks="2(x2)", nodes="n[01-03,7],m1"))
    assert (one["master_addr"], one["master_port"], one["nnodes"]) == ("127.0.0.1", PORT, (1, 1))
    assert (two["master_addr"], two["master_port"], two["nnodes"]) == ("n01", PORT, (2, 2))


def test_jobs_and_steps_get_different_ports():
    jobs = [(job, step) for job in range(5000, 5100) for step in range(7)]
    environs = [task(0, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job, step in jobs]
    ports = [values(environ)["master_port"] for environ in environs]
    assert len(set(ports)) == len(ports)
    assert all(60999 < port < 65536 for port in ports)


def test_nproc_per_node_that_conflicts_with_slurm_is_an_error():
    with pytest.raises(UsageError, match="--nproc-per-node 4 conflicts with srun") as caught:
        layer(task(0, tasks="2"), nproc_per_node=4)
    assert "--nproc-per-node 4" in str(caught.value)
    assert layer(task(0, tasks="2"), nproc_per_node=2).scheduled_rank is not None


def test_settings_that_need_a_supervisor_are_warnings():
    warnings = layer(task(0, tasks="2"), max_restarts=3, tee=3, local_ranks_filter=frozenset((0,))).warnings
    assert [warning.split()[0] for warning in warnings] == ["--max-restarts", "--tee"]


# CPUs


@pytest.mark.parametrize(
    ("why", "masks", "machine", "own"),
    [
        ("a mask for each task", "0x3,0xc", Machine(cpus=2, host_cpus=16), True),
        ("the same mask twice", "0xf,0xf", Machine(cpus=4, host_cpus=16), False),
        ("--cpu-bind=none", "", Machine(cpus=16, host_cpus=16), False),
        ("a cgroup of one task's size", "", Machine(cpus=4, host_cpus=16), True),
        ("a cgroup of the whole step", "", Machine(cpus=8, host_cpus=16), False),
    ],
)
def test_own_cpus(why, masks, machine, own):
    environ = task(1, tasks="2", SLURM_CPU_BIND_LIST=masks, SLURM_CPUS_PER_TASK="4")
    assert layer(environ, machine).scheduled_rank.own_cpus is own, why


def test_requested_cpus_are_divided_among_all_ranks():
    environ = task(1, tasks="2", SLURM_CPU_BIND_LIST="0x3,0xc")
    assert layer(environ, Machine(cpus=2, host_cpus=16), cpus=frozenset((0, 1))).scheduled_rank.own_cpus is False


ONE = Machine(cpus=1, host_cpus=16)


@pytest.mark.parametrize(
    ("why", "environ", "machine", "said"),
    [
        ("srun in sbatch -c16 without -c", task(0), ONE, "a single one of the job's 16 CPUs"),
        ("a step smaller than its job", task(0, SLURM_CPUS_ON_NODE="1"), ONE, "--cpus-per-task=16"),
        ("four tasks share 16", task(0, tasks="4", SLURM_CPU_BIND_LIST="0x1,0x2,0x4,0x8"), ONE, "--cpus-per-task=4"),
        (
            "the job's hosts differ",
            task(1, SLURM_CPUS_ON_NODE="1", SLURM_JOB_CPUS_PER_NODE="1,8", SLURMD_NODENAME="n2"),
            ONE,
            "job's 8 CPUs",
        ),
        ("nothing confines", task(0), Machine(cpus=64, host_cpus=64), "the job has 16 of this host's"),
        (
            "--cpu-bind=sockets",
            task(1, tasks="4", SLURM_CPU_BIND_LIST="0xff,0xff00,0xff,0xff00"),
            Machine(cpus=8, host_cpus=16),
            "each uses 1/4 of its 8 CPUs",
        ),
        ("one socket", task(1, tasks="2", SLURM_CPU_BIND_LIST="0xffff,0xffff"), BIG, None),
        ("one CPU is all there is", task(0, SLURM_CPUS_ON_NODE="1", SLURM_JOB_CPUS_PER_NODE="1(x2)"), ONE, None),
        (
            "one CPU each",
            task(0, tasks="2", SLURM_CPUS_ON_NODE="2", SLURM_JOB_CPUS_PER_NODE="2"),
            Machine(cpus=1, host_cpus=2),
            None,
        ),
        ("all of the allocation", task(0), BIG, None),
        ("old Slurm says nothing of CPUs", without(task(0), "SLURM_CPUS", "SLURM_JOB_CPUS"), ONE, None),
    ],
)
def test_warnings_of_cpus(why, environ, machine, said):
    warnings = layer(environ, machine, scheduler="slurm").warnings
    assert [said in warning for warning in warnings] == ([True] if said else []), why


# When it counts


@pytest.mark.parametrize(
    ("why", "environ", "chosen", "counts"),
    [
        ("no Slurm", {}, {"nproc_per_node": 2}, False),
        ("srun with several tasks", task(0), {}, True),
        ("srun --pty bash", task(0, tasks="1", nodes="n1"), {}, False),
        ("srun --pty bash, a job in it", task(0, tasks="1", nodes="n1"), {"nproc_per_node": 2}, True),
        ("a batch script", without(task(0), "SLURM_STEP"), {"nproc_per_node": 2}, False),
        ("salloc's shell", without(task(0), "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID"), {"nnodes": (1, 1)}, False),
        ("salloc's shell in a step of its own", task(0, SLURM_STEP_ID="4294967290"), {"nproc_per_node": 2}, False),
        ("a rank already", task(0) | {"RANK": "0"}, {"nproc_per_node": 2}, False),
        ("mpirun's daemons in a step", task(1) | {"OMPI_COMM_WORLD_SIZE": "4"}, {}, False),
        ("mpiexec.hydra's", task(1) | {"MPI_LOCALNRANKS": "4"}, {}, False),
        ("srun --mpi=pmi2", task(1) | {"PMI_RANK": "1", "PMI_SIZE": "2"}, {}, True),
        ("a rank already, but asked", task(0) | {"RANK": "0"}, {"scheduler": "slurm"}, True),
        ("a profile alone makes no job", task(0, tasks="1", nodes="n1"), {"smt": True}, False),
        ("asked for on one host", task(0, tasks="1", nodes="n1"), {"scheduler": "slurm"}, True),
    ],
)
def test_when_slurms_variables_apply(why, environ, chosen, counts):
    assert (layer(environ, **chosen) is not None) is counts, why


@pytest.mark.parametrize(
    ("why", "environ", "chosen", "warned"),
    [
        ("srun inside a rank", task(1, tasks="2") | {"RANK": "0", "WORLD_SIZE": "2"}, {}, True),
        ("a larger job's rank", task(0, tasks="2") | {"RANK": "0", "WORLD_SIZE": "8"}, {"nproc_per_node": 1}, True),
        ("a rank of this step", task(1, tasks="2") | {"RANK": "1", "WORLD_SIZE": "2"}, {}, False),
        ("a user's RANK=$SLURM_PROCID", task(1, tasks="2") | {"RANK": "1"}, {}, False),
        ("an agent's rank", task(1) | {"RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}, {}, False),
        ("a step of one task", task(0, tasks="1") | {"RANK": "3", "WORLD_SIZE": "4"}, {}, False),
        ("told so", task(1, tasks="2") | {"RANK": "0"}, {"scheduler": "none"}, False),
        ("copies", task(1, tasks="2") | {"RANK": "0"}, {"instances": 2}, False),
        ("no step", {"RANK": "0", "WORLD_SIZE": "2"}, {}, False),
    ],
)
def test_a_warning_about_a_rank_of_another_step(why, environ, chosen, warned):
    found = layer(environ, **chosen)
    assert (found is not None) is warned, why
    if found is not None:
        assert (dict(found.values), found.scheduled_rank) == ({}, None)
        assert "--scheduler slurm uses srun's rank" in found.warnings[0]


def test_an_old_slurm_without_variables_of_the_step():
    """Before 1.3 the names were those of the job; SLURM_STEPID is the older spelling."""
    old = without(task(3, tasks="2(x2)"), "SLURM_STEP_") | {"SLURM_STEPID": "0"}
    found = layer(old)
    assert found.scheduled_rank == SchedulerRank(rank=3, world_size=4, local_rank=1, local_world_size=2, host_rank=1)
    assert found.values["master_addr"] == "n1"
    assert "SLURM_NNODES" in found.reasons["nnodes"]


def test_slurm_requested_outside_a_step_is_an_error():
    with pytest.raises(UsageError, match="srun did not start this process") as caught:
        layer(without(task(0), "SLURM_STEP"), scheduler="slurm")
    assert "SLURM_STEP_ID is not set" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_STEP_TASKS_PER_NODE", "two"),
        ("SLURM_STEP_NODELIST", "n[1-"),
        ("SLURM_PROCID", "x"),
        ("SLURM_STEP_NUM_TASKS", "-2"),
    ],
)
def test_a_malformed_variable_is_named(name, value):
    with pytest.raises(UsageError, match=name) as caught:
        layer(task(0, **{name: value}), nproc_per_node=1)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("why", "environ"),
    [
        ("more tasks than the step has", task(1, tasks="2", SLURM_PROCID="2")),
        ("the job's counts for a step's task", task(3, tasks="2(x2)", SLURM_STEP_TASKS_PER_NODE="1(x2)")),
        ("a host beyond the list of counts", task(3, tasks="2(x2)", SLURM_STEP_TASKS_PER_NODE="2")),
        ("no tasks", task(1, tasks="2", SLURM_STEP_TASKS_PER_NODE="0")),
        ("more tasks on a host than in all", task(1, tasks="2", SLURM_STEP_TASKS_PER_NODE="4294967290")),
    ],
)
def test_inconsistent_variables_are_an_error(why, environ):
    with pytest.raises(UsageError, match="srun's variables are inconsistent") as caught:
        layer(environ)
    assert "--scheduler none" in str(caught.value), why


def test_a_step_id_of_absurd_length_is_ignored():
    assert layer(task(1, SLURM_STEP_ID="9" * 5000)) is None
