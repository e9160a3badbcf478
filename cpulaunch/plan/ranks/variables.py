"""The variables that tell a rank its number in the job, and how to reach the other ranks."""

from __future__ import annotations

from cpulaunch.records.host import Host
from cpulaunch.records.plan import JobPlan, VariableRequest
from cpulaunch.records.request import LaunchRequest


def rank_variables(job: JobPlan, local_rank: int) -> tuple[tuple[str, str], ...]:
    """The variables of torchrun for one rank of the native engine, as far as they are known before the launch.

    The launch adds MASTER_PORT, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_ERROR_FILE.
    """
    world = str(job.local_world_size)
    return (
        ("RANK", str(local_rank)),
        ("LOCAL_RANK", "0" if job.virtual_local_rank else str(local_rank)),
        ("GROUP_RANK", "0"),
        ("ROLE_RANK", str(local_rank)),
        ("ROLE_NAME", job.role),
        ("LOCAL_WORLD_SIZE", world),
        ("WORLD_SIZE", world),
        ("GROUP_WORLD_SIZE", "1"),
        ("ROLE_WORLD_SIZE", world),
        ("MASTER_ADDR", job.master_addr),
        ("TORCHELASTIC_MAX_RESTARTS", str(job.max_restarts)),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    )


def job_variables(host: Host, request: LaunchRequest, job: JobPlan) -> tuple[VariableRequest, ...]:
    """The variables with one value for all ranks of this host; the user's own values win."""
    if job.engine == "native" or (job.engine == "scheduler" and job.hosts[1] == 1):
        return (*_loopback(host), _ASYNCHRONOUS)
    if request.endpoint_interface is None:
        return ()
    why = "the network interface that leads to the rendezvous endpoint"
    return tuple(
        VariableRequest(name=name, value=request.endpoint_interface, origin="default", reason=why)
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    )


_ASYNCHRONOUS = VariableRequest(
    name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
    value="1",
    origin="default",
    reason="a rank ends when one of its collectives fails on a GPU, as under torchrun",
)


def _loopback(host: Host) -> tuple[VariableRequest, ...]:
    """The loopback interface for gloo. On macOS, which calls it lo0, and on Windows, gloo chooses."""
    if not host.can_bind:
        return ()
    why = "all ranks are on this host, so gloo uses the loopback interface"
    return (VariableRequest(name="GLOO_SOCKET_IFNAME", value="lo", origin="default", reason=why),)
