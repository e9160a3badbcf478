"""What oneCCL is told unless somebody says otherwise: the plan shows it, and a worker adds what is still missing."""

from __future__ import annotations

from cpulaunch.record import record


@record(kw_only=False)
class Default:
    """A variable of oneCCL's, or of what it loads, its value and why."""

    name: str
    value: str
    reason: str


DEFAULTS = (
    Default("CCL_PLUGIN", "ONECCL_LEGACY_CPU", "the part of oneCCL for the CPU's memory"),
    Default("CCL_ATL_TRANSPORT", "ofi", "libfabric between hosts: it needs no MPI"),
    Default("CCL_ATL_SHM", "1", "ranks of one host move data through /dev/shm"),
    Default("CCL_WORKER_OFFLOAD", "0", "no thread of oneCCL's, which would spin on a rank's cores (--ccl-workers)"),
    Default("CCL_LOG_LEVEL", "error", "oneCCL speaks when something fails"),
    Default("CCL_PROCESS_LAUNCHER", "none", "ranks know their place from variables"),
    Default("IPATH_NO_BACKTRACE", "1", "a fabric's library takes no signals away from Python"),
    Default("HFI_NO_BACKTRACE", "1", "a fabric's library takes no signals away from Python"),
)
"""Memory shared on one host, and no thread of oneCCL's that fights ranks for cores.

Source: oneCCL, environment variables; measured on two cores, its own thread makes small messages 1,000 times slower.
The last two are for psm and psm2, which libfabric tries.
"""
FROM_THE_LAUNCH = {"CCL_LOCAL_RANK": "LOCAL_RANK", "CCL_LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
"""What oneCCL wants to know of this host's ranks, and the variable of torch's launchers that says it."""

PATH_VARIABLE = "CPULAUNCH_CCL_PATH"
"""How the backend "ccl" moves data, auto, memory or oneccl; unset is auto."""
