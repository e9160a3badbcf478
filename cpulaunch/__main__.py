"""`python -m cpulaunch` and the console script."""

import gc
import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # `python -m` puts the current folder there: its json.py, or __future__.py, is not what is meant.
from cpulaunch.system.interrupts import INTERRUPTED, end_at_interrupt

end_at_interrupt()
gc.disable()  # There is no garbage worth collecting before the program runs; a supervisor enables it again.

from cpulaunch.cli.main import run_command_line  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> None:
    """Run the command line of this process and exit with its code, without taking Python apart first."""
    sys.unraisablehook = end_if_interrupted
    os._exit(run_command_line(sys.argv[1:]))


def end_if_interrupted(error: "Any") -> None:
    """Effect: ends this process if Python would ignore Ctrl-C, as where it calls __del__; else shows the error."""
    if error.exc_type is KeyboardInterrupt:
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(error)


if __name__ == "__main__":
    main()
