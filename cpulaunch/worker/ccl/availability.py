"""Whether this machine can run the backend "ccl", as far as one process can determine without the others."""

from __future__ import annotations

import platform
import sys

from cpulaunch.records.ccl_defaults import PATH_VARIABLE
from cpulaunch.worker.ccl.oneccl.library import folder
from cpulaunch.worker.ccl.wire.errors import CclError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MACHINE = ("linux", "x86_64")


def check_machine(system: str, architecture: str) -> None:
    """Raises: CclError unless this is x86-64 Linux, which oneCCL and the shared barrier need."""
    if (system, architecture) != MACHINE:
        raise CclError(f"the ccl backend supports x86-64 Linux only, not {architecture} {system}\nhint: use gloo")


def is_available(environ: Mapping[str, str]) -> bool:
    """Whether this machine supports the path that the environment requests (CPULAUNCH_CCL_PATH)."""
    return (sys.platform, platform.machine()) == MACHINE and (environ.get(PATH_VARIABLE) != "oneccl" or has_oneccl())


def has_oneccl() -> bool:
    """Whether oneCCL is installed."""
    try:
        return bool(folder())
    except CclError:
        return False
