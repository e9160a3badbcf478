"""Reading a machine's files, under a root, into a Host."""

from cpulaunch.probe.host import Detail, probe_host
from cpulaunch.probe.root import Root

__all__ = ["Detail", "Root", "probe_host"]
