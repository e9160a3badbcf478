"""Whether the ranks of a job are started once more: a decision without effects."""

from __future__ import annotations

from cpulaunch.records.record import record, replace

MAX_LOST_PORTS = 3
"""A process that takes one port after another does not do so by chance."""


@record
class Attempts:
    """How often the ranks were restarted, after a failure and because another process had taken their port."""

    max_restarts: int
    restarts: int = 0
    lost_ports: int = 0

    def following(self, *, lost_port: bool) -> Attempts | None:
        """The counts of the attempt that follows one that failed; None if none does. A lost port is no restart."""
        if lost_port and self.lost_ports < MAX_LOST_PORTS:
            return replace(self, lost_ports=self.lost_ports + 1)
        return replace(self, restarts=self.restarts + 1) if self.restarts < self.max_restarts else None
