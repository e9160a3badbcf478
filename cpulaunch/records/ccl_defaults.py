"""Default environment variables of oneCCL: the plan shows them, and a worker sets those that are still missing."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@record(kw_only=False)
class CclDefault:
    """A default variable of oneCCL or of a library it loads, with the reason for its value."""

    name: str
    value: str
    reason: str


DEFAULTS = (
    CclDefault("CCL_PLUGIN", "ONECCL_LEGACY_CPU", "oneCCL's implementation for CPU memory"),
    CclDefault("CCL_ATL_TRANSPORT", "ofi", "libfabric between hosts, which needs no MPI"),
    CclDefault("FI_PROVIDER", "tcp", "works on every network; a fabric's own provider is faster"),
    CclDefault("CCL_ATL_SHM", "1", "ranks on one host exchange data through /dev/shm"),
    CclDefault("CCL_WORKER_OFFLOAD", "0", "oneCCL's own thread would spin on a rank's cores (see --ccl-workers)"),
    CclDefault("CCL_LOG_LEVEL", "error", "oneCCL logs errors only"),
    CclDefault("CCL_PROCESS_LAUNCHER", "none", "ranks read their numbers from variables, not from an MPI launcher"),
    CclDefault("FI_TCP_DISABLE_AUTO_PROGRESS", "1", "libfabric's own thread delays messages by milliseconds"),
    CclDefault("IPATH_NO_BACKTRACE", "1", "the fabric's library must not replace Python's signal handlers"),
    CclDefault("HFI_NO_BACKTRACE", "1", "the fabric's library must not replace Python's signal handlers"),
)
"""Shared memory on one host, and no thread of oneCCL that competes with ranks for cores.

Source: oneCCL, environment variables. On two cores, oneCCL's own thread makes small messages 1,000 times slower.
The last two are for psm and psm2, which libfabric tries to load.
"""
TORCH_VARIABLES = {"CCL_LOCAL_RANK": "LOCAL_RANK", "CCL_LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
"""oneCCL's variables for this host's ranks, and the variable of torch's launchers with the value."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""gloo's network interface; a launch sets it to the interface on the route to the rendezvous."""
PATH_VARIABLE = "CPULAUNCH_CCL_PATH"
"""How the backend "ccl" moves data: auto (the default), memory or oneccl."""
MEMORY_LIBRARY = "lib/libcpulaunch_ccl.so"
"""The compiled library for collectives in one host's memory, relative to the package folder."""
MEMORY_LIBRARY_VERSION = 5
"""Version of the library's interface; a library of another version (after an update in place) is not used."""


def network(environ: Mapping[str, str], interfaces: str) -> tuple[CclDefault, ...]:
    """The default variables of oneCCL's network interfaces, which are given with commas; empty if none are given.

    By default oneCCL takes the first interface by name, even a container bridge, and fails if there is only the
    loopback. Fabrics other than TCP choose their own interface.
    """
    if not interfaces:
        return ()
    store = CclDefault("CCL_KVS_IFACE", interfaces.split(",")[0], "interface on which rank 0 listens, same as gloo's")
    provider = environ.get("FI_PROVIDER", "tcp")
    data = CclDefault("CCL_MNIC_NAME", interfaces, "interface for oneCCL's data, same as gloo's")
    return (store, data) if provider in ("tcp", "sockets") else (store,)
