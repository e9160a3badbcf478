"""Which processes are killed, and how long they are waited for, when launches of cpulaunch are below a process."""

import os
import signal
import subprocess

import pytest

from tests.launch.launching import python

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")

PROCESSES = """
    import os, signal, sys
    from cpulaunch.launch.process import descendants
    from cpulaunch.launch.process.descendants import end_launches
    descendants.LAUNCH_SECONDS = descendants.LOWER_SECONDS = 3600.0
    own, one, two = sys.argv[1:]

    def sleeper(directory=None):
        '''A child that has this directory open.'''
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            if directory is not None:
                os.open(directory, os.O_DIRECTORY)
            os.write(tell, b"1")
            signal.alarm(300)  # Not for ever, if it is left by mistake.
            signal.pause()
        os.read(told, 1)
        return pid

    def launch(directory):
        '''The same, but it ends once its own child has, with that one's signal as its exit code; and the latter.'''
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            worker = sleeper()
            os.open(directory, os.O_DIRECTORY)
            os.write(tell, b"%d" % worker)
            os._exit(-end_of(worker))
        return pid, int(os.read(told, 20))

    def end_of(pid):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def left_alone(process, worker=None):
        '''Whether SIGTERM is the first signal that ends the process, or its worker.'''
        os.kill(process if worker is None else worker, signal.SIGTERM)
        return end_of(process) == (-signal.SIGTERM if worker is None else signal.SIGTERM)
"""


@pytest.fixture
def printed(tmp_path):
    """A function that gives what a program prints that starts processes with the directories of runs."""
    names = [tmp_path / f"cpulaunch-{number:012x}" for number in range(3)]
    for name in names:
        name.mkdir()

    def run(code):
        command = python(PROCESSES + code, *map(str, names))
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    return run


def test_a_launch_ends_by_itself_and_all_others_are_killed(printed):
    code = """
    worker, (below, _) = sleeper(), launch(one)
    end_launches()
    print(end_of(worker), end_of(below))
    """
    assert printed(code) == f"{-signal.SIGKILL} {signal.SIGKILL}"


def test_a_worker_that_has_the_directory_of_its_own_run_open_is_no_launch(printed):
    """Whether this process is told of that directory, or has it open itself."""
    code = """
    worker = sleeper(own)
    end_launches(own=frozenset({own}))
    os.open(own, os.O_DIRECTORY)
    end_launches()
    print(left_alone(worker))
    """
    assert printed(code) == "True"


def test_a_worker_that_has_the_directory_of_its_own_run_open_is_killed_like_others(printed):
    code = """
    worker, (below, _) = sleeper(own), launch(one)
    end_launches(own=frozenset({own}))
    print(end_of(worker), end_of(below))
    """
    assert printed(code) == f"{-signal.SIGKILL} {signal.SIGKILL}"


def test_earlier_children_and_launches_below_them_are_left_alone(printed):
    code = """
    job, other, (below, _) = sleeper(), launch(one), launch(two)
    end_launches(spared=frozenset({job, other[0]}))
    print(end_of(below), left_alone(job), left_alone(*other))
    """
    assert printed(code) == f"{signal.SIGKILL} True True"


def test_a_child_that_adopts_orphans_is_kept(printed):
    """Although it is the parent of a launch, its end is not awaited."""
    code = """
    keeper = os.fork()
    if keeper == 0:
        below, worker = launch(one)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.write(tell, b"1")
        signal.sigwait({signal.SIGTERM})
        print(end_of(below))
        os._exit(0)
    os.read(told, 1)
    end_launches(kept=keeper)
    os.kill(keeper, signal.SIGTERM)
    print(end_of(keeper))
    """
    assert printed("    told, tell = os.pipe()" + code) == f"{signal.SIGKILL}\n0"


@pytest.mark.parametrize("guard_is_gone", [False, True])
def test_a_launch_whose_guard_is_gone_has_another_limit(printed, guard_is_gone):
    code = f"""
    descendants.{"LAUNCH_SECONDS" if guard_is_gone else "LOWER_SECONDS"} = 0.0
    below, _ = launch(one)
    end_launches(guard_is_gone={guard_is_gone})
    print(end_of(below))
    held = sleeper(two)
    end_launches(guard_is_gone={not guard_is_gone})
    print(left_alone(held))
    """
    assert printed(code) == f"{signal.SIGKILL}\nTrue"


FORWARDING = """
    import time
    from types import SimpleNamespace
    from cpulaunch.launch.process import guard
    from cpulaunch.launch.process.run_directory import Remains

    class OverdueTwice:
        numbers = [None, None]
        complaint = None
        def next_signal(self, watch):
            time.sleep(0.01)
            return self.numbers.pop() if self.numbers else signal.SIGCHLD

    def forward(child, spared, *, directory=own, logs=None):
        watch = SimpleNamespace(child_has_ended=lambda: False)
        remains = Remains(directory=directory, cgroup=None, logs=logs, has_launches=False)
        return guard._forward_signals(child, OverdueTwice(), watch, remains, spared=spared)
"""


def test_the_guard_of_a_blocked_supervisor_leaves_earlier_children_alone(printed):
    """`job & cpulaunch ... & exec cpulaunch ...`: those before it are nothing of the launch."""
    code = """
    job, other = sleeper(), launch(one)
    child = sleeper(own)
    print(forward(child, frozenset({job, other[0]})), left_alone(job), left_alone(*other))
    """
    assert printed(FORWARDING + code) == f"{-signal.SIGKILL} True True"


def test_the_guard_of_a_blocked_supervisor_lets_launches_below_end_where_it_has_earlier_children(printed):
    code = """
    job, child, (below, _) = sleeper(), sleeper(own), launch(one)
    print(forward(child, frozenset({job})), end_of(below), left_alone(job))
    """
    assert printed(FORWARDING + code) == f"{-signal.SIGKILL} {signal.SIGKILL} True"


@pytest.mark.parametrize("folders", ["directory=own", "directory=None, logs=own"])
def test_a_blocked_supervisor_is_no_launch_to_its_guard(printed, folders):
    """It has the directories of its own run open, and is killed at once."""
    code = f"    print(forward(sleeper(own), frozenset(), {folders}))\n"
    assert printed(FORWARDING + code) == str(-signal.SIGKILL)
