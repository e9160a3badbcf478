"""PBS: `pbsdsh -- cpulaunch --scheduler pbs …`, a process on each host.

Source: OpenPBS and TORQUE, man pbsdsh and man qsub, "ENVIRONMENT VARIABLES". The file named by PBS_NODEFILE lists the
job's hosts, one line for each place on them; OpenPBS keeps it on the job's first host only.
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
    """What PBS says about this process, which stands for its host.

    Raises: UsageError if it says nothing, or the list of hosts is not to be read here.
    """
    said = Variables(environ, TABLE)
    missing, hint = "PBS did not start this process", "pbsdsh -- cpulaunch --scheduler pbs SCRIPT"
    host_rank = said.needed("host_rank", missing=missing, hint=hint)
    job = said.text("job") or "pbs"
    hosts = tuple(dict.fromkeys((machine.nodefile or "").split()))
    if machine.nodefile is not None and host_rank >= len(hosts):
        raise UsageError(
            "PBS counts hosts that its list does not have",
            value=f"PBS_NODENUM {host_rank}, {len(hosts)} hosts in PBS_NODEFILE",
            source="your environment",
            hint="--nnodes N --node-rank R --master-addr HOST",
        )
    return SchedulerTask(
        scheduler="pbs",
        starter="pbsdsh",
        rank=host_rank,
        world_size=len(hosts),
        local_rank=0,
        local_world_size=1,
        hosts=len(hosts),
        host_rank=host_rank,
        job=job,
        master=hosts[0] if hosts else None,
        port_id=(number_of(job), f"PBS_JOBID {job}"),
        one_per_host=True,
        sources=said.sources | {"hosts": "PBS_NODEFILE"},
    )
