"""What oneCCL is told unless somebody says otherwise: the plan shows it, and a worker adds what is still missing."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@record(kw_only=False)
class Default:
    """A variable of oneCCL's, or of what it loads, its value and why."""

    name: str
    value: str
    reason: str


DEFAULTS = (
    Default("CCL_PLUGIN", "ONECCL_LEGACY_CPU", "the part of oneCCL for the CPU's memory"),
    Default("CCL_ATL_SHM", "1", "ranks of one host move data through /dev/shm"),
    Default("CCL_WORKER_OFFLOAD", "0", "no thread of oneCCL's, which would spin on a rank's cores (--ccl-workers)"),
    Default("CCL_LOG_LEVEL", "error", "oneCCL speaks when something fails"),
    Default("CCL_PROCESS_LAUNCHER", "none", "ranks know their place from variables"),
    Default("FI_TCP_DISABLE_AUTO_PROGRESS", "1", "no thread of libfabric, which holds messages up for milliseconds"),
    Default("IPATH_NO_BACKTRACE", "1", "a fabric's library takes no signals away from Python"),
    Default("HFI_NO_BACKTRACE", "1", "a fabric's library takes no signals away from Python"),
)
"""Memory shared on one host, and no thread of oneCCL's that fights ranks for cores.

Source: oneCCL, environment variables; measured on two cores, its own thread makes small messages 1,000 times slower.
The last two are for psm and psm2, which libfabric tries.
"""
_OVER_TCP = (
    Default("CCL_ATL_TRANSPORT", "ofi", "libfabric between hosts: it needs no MPI"),
    Default("FI_PROVIDER", "tcp", "every network has TCP; a fabric's own provider is faster"),
)
_OVER_MPI = (Default("CCL_ATL_TRANSPORT", "mpi", "Intel MPI's launcher started the ranks: its library joins them"),)
FROM_THE_LAUNCH = {"CCL_LOCAL_RANK": "LOCAL_RANK", "CCL_LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
"""What oneCCL wants to know of this host's ranks, and the variable of torch's launchers that says it."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""What gloo is told; a launch sets it to the interface on the way to where the hosts meet."""
PATH_VARIABLE = "CPULAUNCH_CCL_PATH"
"""How the backend "ccl" moves data, auto, memory or oneccl; unset is auto."""
MEMORY_LIBRARY = "lib/libcpulaunch_ccl.so"
"""What is compiled for collectives in one host's memory when cpulaunch is installed, in the package's folder."""
MEMORY_LIBRARY_VERSION = 1
"""Of what the library and who calls it agree on: one from before an update in place is left alone."""


def transport(environ: Mapping[str, str], *, rank: str, world_size: str) -> tuple[Default, ...]:
    """What else oneCCL is told, by what carries data between hosts.

    MPI where Intel MPI's launcher started this rank as this rank: a launch under it that starts several hands all of
    them the variables of one. Source: Intel MPI, Developer Reference (I_MPI_*); PMI-1 (PMI_*).
    """
    place = environ.get("PMI_RANK"), environ.get("PMI_SIZE")
    is_mpi = "I_MPI_HYDRA_UUID" in environ and place == (rank, world_size)
    asked = environ.get("CCL_ATL_TRANSPORT", "mpi" if is_mpi else "ofi")
    return _OVER_MPI if asked == "mpi" else _OVER_TCP


def network(environ: Mapping[str, str], rows: tuple[Default, ...], interfaces: str) -> tuple[Default, ...]:
    """The interfaces for oneCCL, given comma-separated, beside the rows of its transport; none if none are given.

    Left alone it takes the first by name, be it a container bridge, and none on a machine that has the loopback only.
    A fabric of the user's choice finds its own.
    """
    if not interfaces:
        return ()
    meet = Default("CCL_KVS_IFACE", interfaces.split(",")[0], "where rank 0 of oneCCL listens, as for gloo")
    provider = environ.get("FI_PROVIDER", "tcp" if rows == _OVER_TCP else "")
    move = Default("CCL_MNIC_NAME", interfaces, "the network interface for oneCCL's data, as for gloo")
    return (meet, move) if provider in ("tcp", "sockets") else (meet,)
