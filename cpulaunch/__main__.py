"""`python -m cpulaunch` and the console script."""

import gc
import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # `python -m` puts the current folder there: its json.py is not the one that is meant.
gc.disable()  # There is no garbage worth collecting before the program runs; a supervisor enables it again.

from cpulaunch.cli.main import run_command_line  # noqa: E402


def main() -> None:
    """Run the command line of this process and exit with its code, without taking Python apart first."""
    os._exit(run_command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()
