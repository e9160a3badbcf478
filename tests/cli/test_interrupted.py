"""Ctrl-C ends cpulaunch wherever Python runs at that moment."""

import subprocess
import sys
import textwrap

IGNORED = """
    import signal, sys

    class Ignored:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    class Finder:
        def find_spec(self, name, *rest):
            if name == "cpulaunch.cli.usage":
                Ignored()

    import cpulaunch.__main__
    sys.meta_path.insert(0, Finder())
    sys.argv = ["cpulaunch", "--help"]
    cpulaunch.__main__.main()
"""


def test_ctrl_c_during_a_call_whose_exceptions_python_ignores_ends_the_command():
    """As in a callback of the import system: the launch went on, and its workers knew nothing of Ctrl-C."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IGNORED)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
