"""Which rank failed first, and the lines about it."""

import pytest

from cpulaunch.launch.supervision.error_file import RankError
from cpulaunch.launch.supervision.failure_text import TRACEBACK, found_port_in_use, root_cause, summary
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.records.record import replace

AT = 1700000000.5


def rank(index, *, code=None, signal=None, ended_at=AT, recorded=None, text="error", **rest):
    error = None if recorded is None else RankError(text=text, timestamp=recorded)
    values = {"exit_code": code, "signal": signal, "ended_at": ended_at, "error": error}
    return WorkerResult(index=index, rank=index, pid=100 + index, **values, **rest)


def job(*ranks, first=1, attempts=(1, 1), oom=None):
    failed = next(each for each in ranks if each.index == first)
    return LaunchResult(
        exit_code=failed.status, host="h1", workers=ranks, first_failure=first, attempts=attempts, oom_kills=oom
    )


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        ([rank(0, code=0), rank(1, code=3)], 1),
        ([rank(0, code=1, ended_at=AT + 1), rank(1, code=3)], 1),
        ([rank(0, signal=15, ended_at=AT + 0.1), rank(1, code=3)], 1),
        # Rank 0 recorded its exception long before it ended, while rank 1 failed because of it.
        ([rank(0, code=1, ended_at=AT + 9, recorded=int(AT) - 5), rank(1, code=3)], 0),
        # Recorded seconds are whole: within one second the first to end counts.
        ([rank(0, code=1, ended_at=AT + 0.2, recorded=int(AT)), rank(1, signal=9)], 1),
        ([rank(0, code=1, ended_at=AT + 1, recorded=int(AT) + 1), rank(1, code=3, recorded=int(AT))], 1),
    ],
)
def test_the_first_to_fail_is_the_cause(ranks, cause):
    assert root_cause(job(*ranks)).index == cause


@pytest.mark.parametrize("recorded", [1, int(AT) - 11, int(AT) + 10])
def test_a_time_at_which_the_rank_did_not_run_does_not_count(recorded):
    """Rank 1 may have written the file of rank 0, which was then ended."""
    ranks = [rank(0, signal=15, ended_at=AT + 1, recorded=recorded), rank(1, code=3)]
    result = replace(job(*ranks), started_at=AT - 10)
    assert root_cause(result).index == 1
    assert summary(result)[1].startswith("cpulaunch: at 2023-11-1")


def test_the_lines_about_a_failed_rank():
    traceback = f"{TRACEBACK}\n  File x\nValueError: no"
    failed = rank(
        1, code=1, recorded=1700000000, text=traceback, log="logs/1/stderr.log", last_lines=("epoch 3", TRACEBACK, "…")
    )
    others = [rank(0, signal=15), rank(2, code=1, ended_at=AT + 1)]
    lines = summary(job(*others, failed, attempts=(2, 3)))
    assert lines[0] == (
        "cpulaunch: rank 1 (local rank 1, pid 101) on h1 failed (exit code 1); "
        "1 other failed afterwards, the rest were then ended"
    )
    assert lines[1].startswith("cpulaunch: at 2023-11-1")
    assert lines[1].endswith(" (attempt 2 of 3)")
    assert lines[2:] == (
        "cpulaunch: log: logs/1/stderr.log",
        "cpulaunch: its exception:",
        f"  {TRACEBACK}",
        "    File x",
        "  ValueError: no",
        "cpulaunch: last lines of its output:",
        "  epoch 3",
    )


def test_without_a_record_the_last_lines_hold_the_traceback():
    lines = summary(job(rank(1, code=1, last_lines=(TRACEBACK, "KeyError: 3"))))
    assert lines[-3:] == ("cpulaunch: last lines of its output:", f"  {TRACEBACK}", "  KeyError: 3")
    assert lines[0].endswith("failed: exit code 1")


@pytest.mark.parametrize("recorded", [None, 1700000000])
@pytest.mark.parametrize("printed", [(TRACEBACK, "KeyError: 3"), ('  File "a.py", line 1', "KeyError: 3")])
def test_a_traceback_on_the_terminal_is_not_repeated(recorded, printed):
    failed = rank(1, code=1, recorded=recorded, text=f"{TRACEBACK}\nKeyError: 3", last_lines=printed, shown=True)
    lines = summary(job(rank(0, signal=15), failed))
    assert len(lines) == 2
    assert lines[0].endswith("failed (exit code 1); the other was then ended")
    assert lines[1].startswith("cpulaunch: at 2023-11-1")


def test_a_recorded_exception_that_the_terminal_did_not_show_is_quoted():
    failed = rank(1, code=1, recorded=1700000000, text="KeyError: 3", last_lines=("epoch 3",), shown=True)
    assert summary(job(failed))[2:4] == ("cpulaunch: its exception:", "  KeyError: 3")


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([rank(0, code=0, ended_at=AT - 9), rank(2, code=0, ended_at=AT - 1)], "the others had already finished"),
        ([rank(0, code=0, ended_at=AT - 9), rank(2, signal=15, ended_at=AT + 1)], "the others were then ended"),
        ([rank(0, code=0, ended_at=AT + 1)], "the other was then ended"),
        ([rank(0, code=0, ended_at=AT - 1)], "the other had already finished"),
        ([rank(0, code=1, ended_at=AT + 1)], "the other failed afterwards"),
        ([rank(0, code=1), rank(2, code=2)], "the others failed afterwards"),
    ],
)
def test_the_line_about_the_other_workers(others, text):
    lines = summary(job(*others, rank(1, code=3)))
    assert lines[0] == f"cpulaunch: rank 1 (local rank 1, pid 101) on h1 failed (exit code 3); {text}"
    lines = summary(replace(job(*others, rank(1, code=3)), attempts=None))
    assert lines[0] == f"cpulaunch: worker 1 on h1 failed (exit code 3); {text}"


def test_memory_is_the_reason_if_the_kernel_killed():
    lines = summary(job(rank(0, signal=15), rank(1, signal=9), oom=1))
    assert lines[0].endswith("failed (killed by SIGKILL (signal 9: killed)); the other was then ended")
    assert lines[1].startswith("cpulaunch: out of memory")


def test_spaces_of_other_languages_stay_as_they_are():
    text = "読み込み\u3000エラー", "10\u202f000 octets\xa0: trop"
    assert summary(job(rank(1, code=1, last_lines=text)))[-2:] == tuple(f"  {line}" for line in text)


def test_escape_sequences_of_workers_and_hosts_are_shown_as_text():
    text = "ValueError: \x1b]0;owned\x07\n\tin\x9b31m"
    failed = rank(1, code=1, recorded=1700000000, text=text, last_lines=("\x1b[31mred\x1b[0m\x1b[2J", "a\tb"))
    lines = summary(replace(job(rank(0, code=0), failed), host="h\x1b[31m\x1b]"))
    assert lines[0].startswith(r"cpulaunch: rank 1 (local rank 1, pid 101) on h\x1b] failed")
    assert [line for line in lines if line.startswith("  ")] == [
        r"  ValueError: \x1b]0;owned\x07",
        r"        in\x9b31m",
        r"  red\x1b[2J",
        "  a     b",
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("failed to listen on any local network address. port: 29500, code: -98, name: EADDRINUSE", True),
        ("the store cannot listen at 127.0.0.1, port 29500: Address already in use", True),
        ("error while attempting to bind on address ('127.0.0.1', 29500): address already in use", True),
        ("failed to bind to [::]:29500 (errno: 98 - Address already in use)", True),
        ("port 8000: Address already in use", False),
        ("port 129500: Address already in use", False),
        ("port 29500: Connection refused", False),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_port_in_use_is_that_of_the_ranks(line, found, recorded):
    failed = rank(0, code=1, recorded=1700000000, text=f"{TRACEBACK}\n{line}") if recorded else None
    result = job(failed or rank(0, code=1, last_lines=("epoch 29500", line)), first=0)
    assert found_port_in_use(result, 29500) == found
