"""MPI's launchers: `mpirun cpulaunch --from-mpi …`. No MPI library is needed; their variables say enough.

Sources: Open MPI, mpirun(1), "Exported Environment Variables"; MPICH, Hydra's wiki and its proxy's source (PMI_*,
MPI_LOCALRANKID, MPI_LOCALNRANKS); Intel MPI, Developer Reference (I_MPI_*); PMIx standard 4.1, section 2.2.
"""

from __future__ import annotations

from cpulaunch.records.record import record
from cpulaunch.schedulers.task import Machine, SchedulerTask, Variables, check_place, number_of, shared_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@record
class Flavour:
    """One MPI's variables, by property. `bound`: set where mpirun bound its processes."""

    name: str
    table: Mapping[str, tuple[str, ...]]


OPEN_MPI = Flavour(
    name="Open MPI",
    table={
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "host_rank": (),
        "job": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
        "bound": ("OMPI_MCA_orte_bound_at_launch",),
    },
)
HYDRA = Flavour(
    name="MPICH or Intel MPI",
    table={
        "rank": ("PMI_RANK", "PMIX_RANK"),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        "local_world_size": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        "host_rank": ("HYDRA_BSTRAP_NODE_ID",),
        "job": ("I_MPI_HYDRA_UUID", "PMIX_NAMESPACE", "PMI_JOBID", "PALS_APID"),
        "bound": ("I_MPI_PIN_MAPPING", "HYDRA_USER_PROVIDED_BINDING"),
    },
)


def read_task(environ: Mapping[str, str], machine: Machine) -> SchedulerTask:
    """What mpirun says about this process. Raises: UsageError if nothing does, or a variable is malformed."""
    flavour = OPEN_MPI if "OMPI_COMM_WORLD_SIZE" in environ else HYDRA
    said = Variables(environ, flavour.table)
    missing, hint = "mpirun did not start this process", "mpirun -np N cpulaunch --from-mpi SCRIPT"
    rank = said.needed("rank", missing=missing, hint=hint)
    world_size = said.needed("world_size", missing=missing, hint=hint)
    local_rank = said.needed("local_rank", missing=f"{flavour.name} does not say which of a host's it is", hint=hint)
    here = said.needed("local_world_size", missing=f"{flavour.name} does not say how many a host has", hint=hint)
    check_place("mpirun", rank=rank, world_size=world_size, local_rank=local_rank, here=here)
    hosts = -(-world_size // here)
    job = said.text("job")
    bound = said.text("bound") is not None or _silent(flavour, environ)
    return SchedulerTask(
        scheduler="mpi",
        starter="mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=here,
        hosts=hosts,
        host_rank=rank if here == 1 else said.number("host_rank") if flavour is HYDRA else None,
        job=job or "mpi",
        master=None,
        port_id=None if job is None else (number_of(job), f"{said.sources['job']} {job}"),
        one_per_host=here == 1,
        own_cpus=bound and machine.cpus * here <= machine.host_cpus,
        sources=said.sources,
        warnings=_warnings(machine, bound=bound, here=here),
    )


def _silent(flavour: Flavour, environ: Mapping[str, str]) -> bool:
    """Whether this is Open MPI 5, which binds to cores unless told otherwise and does not say so."""
    return flavour is OPEN_MPI and "OMPI_MCA_orte_hnp_uri" not in environ


def _warnings(machine: Machine, *, bound: bool, here: int) -> tuple[str, ...]:
    if bound and machine.cpus == 1 and machine.host_cpus > here:
        return (
            f"mpirun lets this process run on ONE of this host's {machine.host_cpus} CPUs: everything here would share "
            "it; mpirun --bind-to none (Open MPI, MPICH) or -genv I_MPI_PIN=0 (Intel MPI) leaves that to cpulaunch",
        )
    if bound and here > 1 and machine.cpus < machine.host_cpus < machine.cpus * here:
        return (
            f"mpirun bound several of this host's processes to the same CPUs: {shared_text(machine.cpus, here)}; "
            "mpirun --bind-to none (Open MPI, MPICH) or -genv I_MPI_PIN=0 (Intel MPI) leaves all CPUs to cpulaunch",
        )
    return ()
