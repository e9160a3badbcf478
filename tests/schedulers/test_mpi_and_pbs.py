"""The variables of MPI's launchers and of PBS -> a layer, as tables."""

import pytest

from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import SchedulerRank
from cpulaunch.schedulers.layer import scheduler_layer
from cpulaunch.schedulers.task import FIRST_PORT, PORTS, Machine
from tests.schedulers.slurm_variables import BIG, without

USER_BOUND = {"HYDRA_USER_PROVIDED_BINDING": "1"}
"""As MPICH 4.3 and 5.0 tell of -bind-to."""
UUID = "fe6d0000-8724-171c-d360-0600a3ef105d"


def open_mpi(rank: int, world: int, local_rank: int, here: int, *, job: str = "120782849") -> dict[str, str]:
    """As Open MPI 4.1 sets them. Source: mpirun(1), "Exported Environment Variables"; the rest as seen."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(here),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "OMPI_MCA_ess_base_jobid": job,
        "OMPI_MCA_orte_hnp_uri": "120782848.0;tcp://192.0.2.2:40159",
        "PMIX_NAMESPACE": job,
        "PMIX_RANK": str(rank),
    }


def hydra(rank: int, world: int, local_rank: int, here: int, **other: str) -> dict[str, str]:
    """As MPICH 4.0's mpiexec.hydra sets them: nothing names the job."""
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(world),
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(here),
        "PMI_FD": str(local_rank + 6),
    } | other


def intel(rank: int, world: int, local_rank: int, here: int) -> dict[str, str]:
    """As Intel MPI 2021.19 sets them, pinning switched on."""
    own = {"I_MPI_HYDRA_UUID": UUID, "HYDRA_BSTRAP_NODE_ID": str(rank // here), "I_MPI_PIN_MAPPING": "2:0 0,1 1"}
    return hydra(rank, world, local_rank, here, **own)


def layer(environ, machine=BIG, **chosen):
    return scheduler_layer(environ, {"scheduler": "mpi"} | chosen, machine)


@pytest.mark.parametrize("flavour", [open_mpi, intel])
def test_ranks_of_one_host(flavour):
    found = layer(flavour(1, 2, 1, 2))
    assert found.scheduled_rank == SchedulerRank(
        rank=1, world_size=2, local_rank=1, local_world_size=2, host_rank=0, own_cpus=False
    )
    assert found.values["master_addr"] == "127.0.0.1"
    assert found.values["nnodes"] == (1, 1)


@pytest.mark.parametrize(
    ("environ", "port", "why"),
    [
        (open_mpi(0, 2, 0, 2), FIRST_PORT + 120782849 % PORTS, "PMIX_NAMESPACE 120782849"),
        (
            without(open_mpi(0, 2, 0, 2), "PMIX"),
            FIRST_PORT + 120782849 % PORTS,
            "OMPI_MCA_ess_base_jobid 120782849",
        ),
        (intel(0, 2, 0, 2), FIRST_PORT + int.from_bytes(UUID.encode()) % PORTS, f"I_MPI_HYDRA_UUID {UUID}"),
        (hydra(0, 2, 0, 2, PALS_APID="7"), FIRST_PORT + 7, "PALS_APID 7"),
        (hydra(0, 2, 0, 2, MASTER_PORT="4000"), 4000, "MASTER_PORT in the environment"),
    ],
)
def test_the_port_is_derived_from_the_job(environ, port, why):
    found = layer(environ)
    assert found.values["master_port"] == port
    assert why in found.reasons["master_port"]


def test_the_job_name_may_be_any_text():
    for name in ("9" * 5000, "\udcff"):
        assert FIRST_PORT <= layer(open_mpi(0, 2, 0, 2, job=name)).values["master_port"] < FIRST_PORT + PORTS


def test_two_jobs_differ_and_ranks_of_one_agree():
    ports = [layer(open_mpi(rank, 2, rank, 2, job=job)).values["master_port"] for job in "78" for rank in (0, 1)]
    assert ports[0] == ports[1] != ports[2] == ports[3]


def test_mpich_needs_a_port():
    with pytest.raises(UsageError, match="cannot choose a port for this job") as caught:
        layer(hydra(0, 2, 0, 2))
    assert "--master-port" in str(caught.value)
    assert layer(hydra(0, 2, 0, 2), master_port=4000).values["master_port"] == 4000


def test_two_hosts_need_rank_0s_address():
    with pytest.raises(UsageError, match="cannot determine the host of rank 0") as caught:
        layer(open_mpi(2, 4, 0, 2))
    assert "--master-addr HOST, or mpirun -x MASTER_ADDR=HOST" in str(caught.value)
    for found in (
        layer(open_mpi(2, 4, 0, 2) | {"MASTER_ADDR": "head"}),
        layer(open_mpi(2, 4, 0, 2), master_addr="head"),
    ):
        assert (found.values["master_addr"], found.values["nnodes"]) == ("head", (2, 2))
        assert found.scheduled_rank == SchedulerRank(
            rank=2, world_size=4, local_rank=0, local_world_size=2, host_rank=1
        )


def test_one_process_per_host_is_a_rank_or_with_nproc_a_host():
    environ = open_mpi(1, 2, 0, 1) | {"MASTER_ADDR": "head"}
    assert layer(environ).scheduled_rank == SchedulerRank(
        rank=1, world_size=2, local_rank=0, local_world_size=1, host_rank=1
    )
    host = layer(environ, nproc_per_node=4)
    assert host.scheduled_rank is None
    assert (host.values["nnodes"], host.values["node_rank"], host.values["master_addr"]) == ((2, 2), 1, "head")


@pytest.mark.parametrize(
    ("why", "environ", "machine", "own"),
    [
        ("bound to a core each", open_mpi(1, 2, 1, 2), Machine(cpus=1, host_cpus=2), True),
        ("--bind-to none", without(open_mpi(1, 2, 1, 2), "OMPI_MCA_orte_bound"), Machine(cpus=2, host_cpus=2), False),
        ("bound to a socket by twos", open_mpi(1, 4, 1, 4), Machine(cpus=8, host_cpus=16), False),
        ("Intel MPI pins", intel(1, 2, 1, 2), Machine(cpus=1, host_cpus=2), True),
        ("MPICH does not", hydra(1, 2, 1, 2, MASTER_PORT="1"), Machine(cpus=4, host_cpus=16), False),
        ("unless asked to", hydra(1, 2, 1, 2, MASTER_PORT="1", **USER_BOUND), Machine(cpus=2, host_cpus=4), True),
        ("to nothing", hydra(1, 2, 1, 2, MASTER_PORT="1", **USER_BOUND), Machine(cpus=4, host_cpus=4), False),
        ("Open MPI 5 does", without(open_mpi(1, 2, 1, 2), "OMPI_MCA"), Machine(cpus=1, host_cpus=2), True),
    ],
)
def test_own_cpus(why, environ, machine, own):
    bound = {"OMPI_MCA_orte_bound_at_launch": "1"} if "to a" in why else {}
    assert layer(environ | bound, machine).scheduled_rank.own_cpus is own, why


def test_a_warning_about_a_single_cpu():
    bound = open_mpi(0, 2, 0, 2) | {"OMPI_MCA_orte_bound_at_launch": "1"}
    (warning,) = layer(bound, Machine(cpus=1, host_cpus=16)).warnings
    assert "--bind-to none" in warning
    assert layer(bound, Machine(cpus=1, host_cpus=2)).warnings == ()


def test_a_warning_about_shared_cpus():
    """Open MPI 4 binds more than two processes to sockets unless told otherwise."""
    bound = open_mpi(1, 4, 1, 4) | {"OMPI_MCA_orte_bound_at_launch": "1"}
    (warning,) = layer(bound, Machine(cpus=8, host_cpus=16)).warnings
    assert "each uses 1/4 of its 8 CPUs; the rest stay idle" in warning
    for all_or_own in (16, 4):
        assert layer(bound, Machine(cpus=all_or_own, host_cpus=16)).warnings == ()
    assert layer(open_mpi(1, 4, 1, 4), Machine(cpus=8, host_cpus=16)).warnings == ()


def test_mpi_is_used_on_request_only():
    assert scheduler_layer(open_mpi(0, 2, 0, 2), {"nproc_per_node": 2}, BIG) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "mpirun did not start this process"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "cannot determine the local rank"),
        (open_mpi(2, 2, 0, 2), "are inconsistent"),
        (open_mpi(0, 2, 0, 2) | {"OMPI_COMM_WORLD_SIZE": "two"}, "in OMPI_COMM_WORLD_SIZE: expected a whole number"),
        (open_mpi(0, 2, 0, 0), "are inconsistent"),
        (
            open_mpi(0, 2, 0, 2) | {"OMPI_COMM_WORLD_SIZE": "9" * 5000},
            "in OMPI_COMM_WORLD_SIZE: expected a whole number",
        ),
    ],
)
def test_missing_or_malformed_variables_are_errors(environ, message):
    with pytest.raises(UsageError, match=message):
        layer(environ)


# PBS


def pbs(host: int) -> dict[str, str]:
    """As OpenPBS sets them for what pbsdsh starts."""
    return {"PBS_JOBID": "77.head", "PBS_NODENUM": str(host), "PBS_TASKNUM": "1", "PBS_NODEFILE": "/var/aux/77.head"}


def pbs_layer(host: int, nodefile: str | None, **chosen):
    return scheduler_layer(pbs(host), {"scheduler": "pbs"} | chosen, Machine(cpus=16, host_cpus=16, nodefile=nodefile))


def test_pbs_hosts_come_from_the_nodefile():
    found = pbs_layer(1, "a\na\nb\nb\n", nproc_per_node=2)
    assert dict(found.values) == {
        "scheduler": "pbs",
        "nnodes": (2, 2),
        "node_rank": 1,
        "master_addr": "a",
        "master_port": FIRST_PORT + int.from_bytes(b"77.head") % PORTS,
        "rdzv_id": "pbs-77.head",
    }
    assert "PBS_NODEFILE" in found.reasons["nnodes"]


def test_pbs_on_one_host():
    assert dict(pbs_layer(0, "a\na\n").values) == {"scheduler": "pbs", "nnodes": (1, 1)}


def test_pbs_without_the_nodefile_needs_nnodes():
    with pytest.raises(UsageError, match="cannot determine the number of hosts"):
        pbs_layer(1, None)
    with pytest.raises(UsageError, match="cannot determine the host of rank 0"):
        pbs_layer(1, None, nnodes=(2, 2))
    found = pbs_layer(1, None, nnodes=(2, 2), master_addr="a")
    assert (found.values["node_rank"], found.values["master_addr"]) == (1, "a")


def test_pbs_requested_outside_a_job_is_an_error():
    with pytest.raises(UsageError, match="PBS did not start this process"):
        scheduler_layer({}, {"scheduler": "pbs"}, BIG)


def test_pbs_host_rank_beyond_the_nodefile_is_an_error():
    with pytest.raises(UsageError, match="PBS_NODENUM is 5, but PBS_NODEFILE lists 2 hosts"):
        pbs_layer(5, "a\nb\n")
