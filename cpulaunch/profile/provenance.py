"""Where a profile that was measured comes from, and whether this machine and these versions are still the same."""

from __future__ import annotations

import cpulaunch
from cpulaunch.records.cpulist import format_cpulist

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpulaunch.profile.model import Profile
    from cpulaunch.records.host import Host

NAMES = {"cpu": "the CPU", "cpus": "the CPUs", "threads": "the number of threads", "torch": "torch"}


def machine_facts(host: Host) -> dict[str, str]:
    """The facts by which a machine is told from another: those that a launch reads in any case."""
    budget = host.limits.budget
    return {
        "cpu": host.cpu.model_name or host.cpu.vendor or host.arch,
        "cpus": format_cpulist(budget.cpus),
        "threads": str(budget.threads),
    }


def version_facts(host: Host) -> dict[str, str]:
    """The versions that measurements depend on, as far as they are known."""
    torch = {} if host.torch is None else {"torch": host.torch.version}
    return {"cpulaunch": cpulaunch.__version__, **torch}


def provenance_warning(profile: Profile, host: Host) -> str | None:
    """What has changed since the profile was measured, in a line; None if nothing has, or it was not measured."""
    changes = _changes(dict(profile.provenance), {**machine_facts(host), **version_facts(host)})
    if not changes:
        return None
    return f"profile {profile.name} was measured elsewhere: {'; '.join(changes)}; cpulaunch tune measures again"


def _changes(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{NAMES.get(name, name)} was {recorded[name]}, is {value}"
        for name, value in now.items()
        if recorded.get(name, value) != value
    ]
