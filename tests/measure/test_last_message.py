"""The message with which a failed program ended."""

import pytest

from cpulaunch.measure.last_message import MAX_MESSAGE, last_message

TRACEBACK = "Traceback (most recent call last):\n  File 'a.py', line 1\nValueError: bad data\n"
RANKS = "[1] [rank1]: Traceback (most recent call last):\n[1] [rank1]: ValueError: bad data\n"
WARNING = "/lib/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked object\n  warnings.warn('1 leaked')\n"
IGNORED = f"Exception ignored in: <function A.__del__ at 0x7f>\n{TRACEBACK.replace('bad data', 'late')}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{RANKS}[1] [rank1]:[W1123 22:57:01.123 a.cpp:1] lost\n", "[1] [rank1]: ValueError: bad data"),
        (f"{TRACEBACK}[rank0]:[W1123 22:57:01.123 a.cpp:1] lost\n", "ValueError: bad data"),
        (f"{TRACEBACK}{WARNING}", "ValueError: bad data"),
        (f"{TRACEBACK}{IGNORED}{IGNORED}{WARNING}", "ValueError: bad data"),
        (f"{IGNORED}{TRACEBACK}", "ValueError: bad data"),
        (f"{WARNING}{IGNORED}killed\n", "killed"),
        (WARNING, ""),
        ("", ""),
        ("\n \n", ""),
        (TRACEBACK, "ValueError: bad data"),
        (
            f"{TRACEBACK}[W1123 22:57:01.123 collection.cpp:1170] Warning: lost (function stop)\n",
            "ValueError: bad data",
        ),
        (f"{TRACEBACK}W1123 22:57:01.123 1 torch/distributed/run.py:1] slow\n", "ValueError: bad data"),
        (
            f"{TRACEBACK}STAGE:2026-11-23 22:57:01 1:1 ActivityProfilerController.cpp:314] done\n",
            "ValueError: bad data",
        ),
        *[
            (f"{level}:2026-11-23 22:57:01 no space left\n", f"{level}:2026-11-23 22:57:01 no space left")
            for level in ("ERROR", "CRITICAL", "FATAL")
        ],
        ("[E1123 22:57:01.123 a.cpp:1] failed\n", "[E1123 22:57:01.123 a.cpp:1] failed"),
        (f"{TRACEBACK}cpulaunch: worker 0 failed\n", "ValueError: bad data"),
        ("cpulaunch: worker 0 failed\ncpulaunch: report: r.json\n", "cpulaunch: worker 0 failed"),
        ("cpulaunch: report: r.json\n", ""),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("x" * 1000, "x" * MAX_MESSAGE),
    ],
)
def test_the_last_line_of_the_program(text, message):
    assert last_message(text.encode()) == message


def test_bytes_that_are_no_text():
    assert last_message(b"\xff bad") == "� bad"
