"""Jobs of two ranks in the start-up bench: the comparison of launchers, and a job that fails."""

import sys

import pytest
from commands import BenchError, Command
from first_lines import compare_first_lines, first_line_milliseconds, job_command


def test_each_program_is_compared_with_itself_under_torchrun() -> None:
    samples = {
        "torchrun, first line": [100.0, 300.0],
        "cpulaunch, first line": [10.0, 10.0],
        "torchrun, first all-reduce": [500.0, 500.0],
        "cpulaunch, first all-reduce": [250.0, 250.0],
    }
    compared = compare_first_lines(samples)
    assert compared["cpulaunch, first line"]["times_sooner_than_torchrun"].median == 20.0
    assert compared["cpulaunch, first all-reduce"]["times_sooner_than_torchrun"].median == 2.0


def test_both_launchers_get_the_same_arguments() -> None:
    cpulaunch, torchrun = (job_command(f"{launcher}, first line").argv for launcher in ("cpulaunch", "torchrun"))
    assert cpulaunch[1:] == torchrun[1:]
    assert cpulaunch[0] != torchrun[0]


@pytest.mark.parametrize(("code", "message"), [("print(1); raise SystemExit(3)", "exit code 3"), ("", "first line ''")])
def test_a_job_that_fails_or_prints_nothing_is_an_error(code: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        first_line_milliseconds(Command(argv=(sys.executable, "-c", code)))
