"""The lines about the end of a launch."""

import pytest

from cpulaunch.launch.supervision.failure_text import signal_text, summary
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult, oom_kills


def result(*, exit_code=None, signal=None, oom=None, lines=(), workers=2, shown=False):
    failed = WorkerResult(index=1, pid=7, exit_code=exit_code, signal=signal, last_lines=tuple(lines), shown=shown)
    good = WorkerResult(index=0, pid=6, exit_code=0, signal=None)
    both = (good, failed) if workers == 2 else (failed,)
    return LaunchResult(exit_code=failed.status, host="h1", workers=both, first_failure=1, oom_kills=oom)


def test_an_exit_code_is_named():
    assert summary(result(exit_code=3)) == ("cpulaunch: worker 1 on h1 failed (exit code 3); the other was then ended",)


def test_a_signal_is_named_with_its_meaning():
    assert summary(result(signal=11, workers=1)) == (
        "cpulaunch: worker 1 on h1 failed: killed by SIGSEGV (signal 11: segmentation fault)",
    )


@pytest.mark.parametrize(("signal", "oom", "blamed"), [(9, 1, True), (9, 0, False), (9, None, False), (11, 1, False)])
def test_memory_is_the_reason_only_if_the_kernel_killed(signal, oom, blamed):
    assert ("out of memory" in "\n".join(summary(result(signal=signal, oom=oom)))) == blamed


def test_memory_is_the_reason_through_a_shell_too():
    assert "out of memory" in "\n".join(summary(result(exit_code=137, oom=1)))


def test_the_last_lines_are_quoted():
    assert summary(result(exit_code=1, lines=["a", "b"]))[1:] == ("cpulaunch: last lines of its output:", "  a", "  b")


def test_a_signal_to_the_launcher_is_named():
    ended = LaunchResult(exit_code=143, host="h1", workers=(), ended_by=15)
    assert summary(ended) == ("cpulaunch: stopped by SIGTERM (signal 15: terminated)",)


def test_unknown_signals_are_named_by_number():
    assert signal_text(34 + 3).startswith("signal 37")


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 0\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", 7),
        ("oom_kill_disable 0\nunder_oom 0\n", None),
        ("oom_kill many\n", None),
        ("", None),
    ],
    ids=["v2", "v1", "v1 before 4.13", "malformed", "empty"],
)
def test_kills_are_read_from_the_events_of_both_cgroup_versions(text, kills):
    assert oom_kills(text) == kills


@pytest.mark.parametrize(("shown", "quoted"), [(True, False), (False, True)])
def test_a_traceback_on_the_terminal_is_not_repeated(shown, quoted):
    for lines in (["Traceback (most recent call last):", "KeyError: 3"], ['  File "a.py", line 1', "KeyError: 3"]):
        assert ("  KeyError: 3" in summary(result(exit_code=1, lines=lines, shown=shown))) == quoted


def test_a_launch_that_ended_well_after_a_signal_has_no_lines():
    assert summary(LaunchResult(exit_code=0, host="h1", workers=(), ended_by=15)) == ()
