"""MPI's launchers: `mpirun cpulaunch --from-mpi …`. Only their variables are read; no MPI library is needed.

Sources: Open MPI, mpirun(1), "Exported Environment Variables"; MPICH, Hydra's wiki and its proxy's source (PMI_*,
MPI_LOCALRANKID, MPI_LOCALNRANKS); Intel MPI, Developer Reference (I_MPI_*); PMIx standard 4.1, section 2.2.
"""

from __future__ import annotations

from cpulaunch.records.record import record
from cpulaunch.schedulers.task import Machine, SchedulerTask, Variables, check_ranks, number_of, shared_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@record
class MpiVariant:
    """The variables of one MPI, by property. `bound` is set if mpirun bound its processes."""

    name: str
    table: Mapping[str, tuple[str, ...]]


OPEN_MPI = MpiVariant(
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
HYDRA = MpiVariant(
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
    """The process that mpirun started, from its variables. Raises: UsageError if one is missing or malformed."""
    variant = OPEN_MPI if "OMPI_COMM_WORLD_SIZE" in environ else HYDRA
    variables = Variables(environ, variant.table)
    hint = "mpirun -np N cpulaunch --from-mpi SCRIPT"
    no_mpi = "mpirun did not start this process"
    rank = variables.required("rank", error=no_mpi, hint=hint)
    world_size = variables.required("world_size", error=no_mpi, hint=hint)
    local_rank = variables.required("local_rank", error="cannot determine the local rank", hint=hint)
    local_world_size = variables.required(
        "local_world_size", error="cannot determine the number of ranks on this host", hint=hint
    )
    check_ranks("mpirun", rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)
    job = variables.text("job")
    bound = variables.text("bound") is not None or _is_open_mpi_5(variant, environ)
    one_per_host = local_world_size == 1
    return SchedulerTask(
        scheduler="mpi",
        launcher="mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        hosts=-(-world_size // local_world_size),
        host_rank=rank if one_per_host else variables.number("host_rank") if variant is HYDRA else None,
        job=job or "mpi",
        first_host=None,
        port_seed=None if job is None else (number_of(job), f"{variables.sources['job']} {job}"),
        one_per_host=one_per_host,
        own_cpus=bound and machine.cpus * local_world_size <= machine.host_cpus,
        sources=variables.sources,
        warnings=_warnings(machine, bound=bound, ranks=local_world_size),
    )


def _is_open_mpi_5(variant: MpiVariant, environ: Mapping[str, str]) -> bool:
    """Whether this is Open MPI 5, which binds ranks to cores by default without setting a variable for it."""
    return variant is OPEN_MPI and "OMPI_MCA_orte_hnp_uri" not in environ


UNBOUND = "mpirun --bind-to none (Open MPI, MPICH) or -genv I_MPI_PIN=0 (Intel MPI)"


def _warnings(machine: Machine, *, bound: bool, ranks: int) -> tuple[str, ...]:
    """Warnings about mpirun's binding of this host's ranks."""
    if bound and machine.cpus == 1 and machine.host_cpus > ranks:
        return (
            f"mpirun bound this process to a single one of this host's {machine.host_cpus} CPUs; {UNBOUND} "
            "lets cpulaunch bind it",
        )
    if bound and ranks > 1 and machine.cpus < machine.host_cpus < machine.cpus * ranks:
        return (
            f"mpirun bound several processes on this host to the same CPUs: {shared_text(machine.cpus, ranks)}; "
            f"{UNBOUND} lets cpulaunch use all CPUs",
        )
    return ()
