"""PBS: `pbsdsh -- cpulaunch --scheduler pbs …` starts one process on each host.

Source: OpenPBS and TORQUE, man pbsdsh and man qsub, "ENVIRONMENT VARIABLES". The file named by PBS_NODEFILE lists the
job's hosts, with one line for each slot on them; with OpenPBS it exists on the job's first host only.
"""

from __future__ import annotations

from cpulaunch.records.errors import UsageError
from cpulaunch.schedulers.task import Machine, SchedulerTask, Variables, number_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TABLE = {
    "job": ("PBS_JOBID",),
    "host_rank": ("PBS_NODENUM",),
}


def read_task(environ: Mapping[str, str], machine: Machine) -> SchedulerTask:
    """The process that PBS started on this host, from its variables.

    Raises: UsageError if a variable is missing, or contradicts the list of hosts.
    """
    variables = Variables(environ, TABLE)
    hint = "pbsdsh -- cpulaunch --scheduler pbs SCRIPT"
    host_rank = variables.required("host_rank", error="PBS did not start this process", hint=hint)
    job = variables.text("job") or "pbs"
    hosts = tuple(dict.fromkeys((machine.nodefile or "").split()))
    if machine.nodefile is not None and host_rank >= len(hosts):
        raise UsageError(
            f"PBS_NODENUM is {host_rank}, but PBS_NODEFILE lists {len(hosts)} host{'s' * (len(hosts) != 1)}",
            source="environment",
            hint="--nnodes N --node-rank R --master-addr HOST",
        )
    return SchedulerTask(
        scheduler="pbs",
        launcher="pbsdsh",
        rank=host_rank,
        world_size=len(hosts),
        local_rank=0,
        local_world_size=1,
        hosts=len(hosts),
        host_rank=host_rank,
        job=job,
        first_host=hosts[0] if hosts else None,
        port_seed=(number_of(job), f"PBS_JOBID {job}"),
        one_per_host=True,
        sources=variables.sources | {"hosts": "PBS_NODEFILE"},
    )
