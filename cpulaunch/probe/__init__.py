"""Reading a machine's files, under a root, into a Host.

Every launch pays for importing this package: internal records are `record`s, whose classes are made eight times
faster than dataclasses (0.13 against 1.1 ms each on a 2-core Xeon).
"""

from cpulaunch.probe.host import Detail, probe_host
from cpulaunch.system.root import Root

__all__ = ["Detail", "Root", "probe_host"]
