"""A job of ranks as text for a person and as JSON."""

from typing import Any

from cpulaunch.records.host import count_text
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.record import fields


def job_json(job: JobPlan | None) -> Any:
    """The job as JSON-ready data, a key for each field; None for a launch that is not a job of ranks.

    Schema 1 calls a rank that a scheduler started a member.
    """
    if job is None:
        return None
    made = _plain(job)
    made["member"] = made.pop("scheduled_rank")
    return made | {"engine": "member" if job.engine == "scheduler" else job.engine}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "__slots__"):
        return {name: _plain(getattr(value, name)) for name in fields(type(value))}
    return value


def job_title(plan: LaunchPlan, job: JobPlan) -> str:
    """How many ranks there are, and where."""
    ranks = count_text(plan.world_size, "rank")
    fewest, most = job.hosts
    here = f", {len(plan.workers)} started here" if len(plan.workers) < plan.world_size else ""
    if most == 1:
        return f"{ranks} on one host{here}"
    hosts = f"{most} hosts" if fewest == most else f"{fewest} to {most} hosts"
    return f"{ranks} on {hosts}{here}"
