"""Ctrl-C ends cpulaunch with 130 and no word, wherever Python runs at that moment."""

import subprocess
import sys
import textwrap

import pytest

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

AT_EVERY_CALL = """
    import os, signal, sys

    class Moment:
        left = None  # Counted from the moment on at which cpulaunch can know of Ctrl-C.

        def __call__(self, frame, event, argument):
            if event == "return" and frame.f_code.co_name == "end_at_interrupt":
                Moment.left = int(sys.argv.pop(1))
            elif Moment.left is not None and event in ("call", "c_call"):
                Moment.left -= 1
                if Moment.left == 0:
                    signal.raise_signal(signal.SIGINT)

    sys.setprofile(Moment())
    import cpulaunch.__main__
    sys.argv[0] = "cpulaunch"
    cpulaunch.__main__.main()
"""


def run(code, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_during_a_call_whose_exceptions_python_ignores_ends_the_command():
    """As in a callback of the import system: the launch went on, and its workers knew nothing of Ctrl-C."""
    assert run(IGNORED) == (130, "", "")


@pytest.mark.parametrize("call", [1, 30, 300, 1000, 2000, 3000, 5000, 10_000])
def test_ctrl_c_at_some_call_of_the_start_up_ends_it(call):
    """Where a class is created, Python made a RuntimeError of it; during imports, a traceback."""
    assert run(AT_EVERY_CALL, str(call), "--instances", "2", "--", sys.executable, "-c", "pass") == (130, "", "")


def test_an_ignored_ctrl_c_stays_ignored():
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + textwrap.dedent(AT_EVERY_CALL)
    code, out, _ = run(ignoring, "300", "--version")
    assert (code, out[:9]) == (0, "cpulaunch")


CLEANING_UP = """
    import signal
    from cpulaunch.system.interrupts import end_at_interrupt, interruptible

    end_at_interrupt()
    try:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("cleaned up", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("goes on")
"""


def test_code_that_has_to_end_a_process_first_sees_ctrl_c():
    assert run(CLEANING_UP) == (130, "cleaned up\n", "")
