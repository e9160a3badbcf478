"""The native engine: all ranks of a job on this host, restarted together."""

from __future__ import annotations

from cpulaunch.launch.bind import Say
from cpulaunch.plan.model import LaunchPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpulaunch.launch.result import LaunchResult


def launch_ranks(plan: LaunchPlan, *, environ: Mapping[str, str], memory_events: str | None, say: Say) -> LaunchResult:
    """How the ranks ended."""
    raise NotImplementedError
