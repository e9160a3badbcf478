"""`python -m cpulaunch` and the console script."""

import sys

from cpulaunch.cli.main import run_command_line


def main() -> None:
    """Run the command line of this process and exit with its code."""
    sys.exit(run_command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()
