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
    if job.hosts[1] == 1:
        return _loopback(host) if job.engine == "elastic" else (*_loopback(host), _ASYNCHRONOUS)
    if request.endpoint_interface is None:
        return ()
    return _interface(request.endpoint_interface, "the network interface that leads to the rendezvous endpoint")


def _interface(name: str, why: str) -> tuple[VariableRequest, ...]:
    variables = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    return tuple(VariableRequest(name=each, value=name, origin="default", reason=why) for each in variables)


_ASYNCHRONOUS = VariableRequest(
    name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
    value="1",
    origin="default",
    reason="a rank ends when one of its collectives fails on a GPU, as under torchrun",
)
"""torch's agent sets it itself."""


def _loopback(host: Host) -> tuple[VariableRequest, ...]:
    """The loopback interface for gloo and torch's RPC. On macOS, which calls it lo0, and on Windows, these choose."""
    if not host.can_bind:
        return ()
    return _interface("lo", "all ranks are on this host, so they listen on the loopback interface")
