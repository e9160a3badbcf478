"""However a job ends, all of it ends: the ranks, their descendants, and ranks that wait for a missing one."""

import os
import signal
import tempfile

import pytest
from jobs import alive, eventually, parent, text_of

TWO = ("--nproc-per-node", "2")
FAMILY = """
    child = subprocess.Popen(["sleep", "600"])
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    say(f"family.{rank}", f"{os.getpid()} {child.pid} {stranger.pid}")
    time.sleep(600)
"""


def family(launch, ranks=2):
    """The pids of all ranks and of what each started, the rank's own first."""
    return [list(map(int, text_of(launch.folder / f"family.{rank}").split())) for rank in range(ranks)]


def assert_ended(pids):
    eventually(lambda: not any(alive(pid) for pid in pids), f"the end of {pids}")


def test_a_killed_launcher_leaves_nothing(launch):
    launch.write(FAMILY)
    process = launch.start(*TWO, "--max-restarts", "3", "job.py")
    pids = [pid for each in family(launch) for pid in each]
    process.kill()
    assert launch.finish(process).code == -signal.SIGKILL
    assert_ended(pids)


def test_a_killed_supervisor_leaves_nothing(launch):
    launch.write(FAMILY)
    process = launch.start(*TWO, "--max-restarts", "3", "job.py")
    pids = [pid for each in family(launch) for pid in each]
    supervisor = parent(pids[0])
    assert supervisor != process.pid
    os.kill(supervisor, signal.SIGKILL)
    assert launch.finish(process).code == 128 + signal.SIGKILL
    assert_ended(pids)
    assert not list((launch.folder / "tmp").iterdir())


def test_a_killed_rank_ends_all_the_others(launch):
    launch.write(FAMILY)
    process = launch.start(*TWO, "job.py")
    ranks = family(launch)
    os.kill(ranks[1][0], signal.SIGKILL)
    job = launch.finish(process)
    assert job.code == 128 + signal.SIGKILL
    assert f"rank 1 (local rank 1, pid {ranks[1][0]})" in job.err
    assert "killed by SIGKILL" in job.err
    assert_ended([pid for each in ranks for pid in each])


def test_a_rank_that_removes_the_runs_directory_prevents_a_restart(launch):
    launch.write("""
        import shutil
        events = next(value for value in os.environ.values() if value.endswith(".jsonl"))
        shutil.rmtree(os.path.dirname(os.path.dirname(events)))
        sys.exit(3)
    """)
    one = ("--nproc-per-node", "1", "--max-restarts", "1")
    job = launch.run(*one, "--log-dir", "logs", "--report", "report.json", "job.py")
    assert job.code == 125
    assert "error: cannot create the files of this run" in job.err
    assert "Traceback" not in job.err


@pytest.fixture
def shared():
    """A folder that other users can write."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield folder


def test_a_rank_that_removes_the_error_files_changes_no_exit_code(launch, shared):
    """They are not beside the logs if other users can change that folder."""
    launch.write("""
        import shutil
        errors = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
        say("removed", errors)
        shutil.rmtree(errors)
    """)
    job = launch.run("--nproc-per-node", "1", "--log-dir", shared, "job.py")
    assert job.code == 0, job.err
    assert "errors-" in text_of(launch.folder / "removed")


def test_a_killed_rank_is_restarted_with_nothing_left_of_the_last_attempt(launch):
    launch.write("""
        if attempt == 0:
            stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
            say(f"first.{rank}", f"{os.getpid()} {stranger.pid}")
            time.sleep(600)
        pids = [int(pid) for rank in range(2) for pid in open(f"first.{rank}").read().split()]
        say(f"left.{rank}", [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
    """)
    process = launch.start(*TWO, "--max-restarts", "1", "job.py")
    pids = [list(map(int, text_of(launch.folder / f"first.{rank}").split())) for rank in range(2)]
    os.kill(pids[0][0], signal.SIGKILL)
    assert launch.finish(process).code == 0
    assert [(launch.folder / f"left.{rank}").read_text() for rank in range(2)] == ["[]", "[]"]


def test_a_rank_that_ignores_its_end_is_killed_after_the_shutdown_timeout(launch):
    launch.write("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(f"ready.{rank}", os.getpid())
        if rank == 1:
            wait_for("ready.0")
            sys.exit(5)
        while True:
            signal.pause()
    """)
    job = launch.run(*TWO, "--shutdown-timeout", "1", "job.py")
    assert job.code == 5
    assert not alive(int((launch.folder / "ready.0").read_text()))


@pytest.mark.torch
def test_a_rank_that_waits_for_others_in_vain_is_ended_with_them(launch):
    launch.write("""
        if rank == 1:
            wait_for("meeting")
            sys.exit(4)
        import torch.distributed as dist
        say("meeting", os.getpid())
        dist.init_process_group("gloo")
    """)
    job = launch.run(*TWO, "job.py")
    assert job.code == 4
    assert "rank 1 (local rank 1" in job.err
    assert not alive(int((launch.folder / "meeting").read_text()))


@pytest.mark.torch
def test_the_first_to_fail_is_named_and_not_those_it_took_along(launch):
    # Rank 1's store goes with rank 0: it fails too, with an error of its own.
    launch.write("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.all_reduce(torch.ones(1))
    """)
    job = launch.run(*TWO, "job.py")
    assert job.code == 128 + signal.SIGSEGV
    assert "rank 0 (local rank 0" in job.err
    assert "SIGSEGV" in job.err


def test_a_program_that_cannot_start_starts_no_rank(launch):
    job = launch.run(*TWO, "--max-restarts", "3", "--no-python", "./no-such-program")
    assert job.code == 127
    assert "restarting" not in job.err
    assert not list((launch.folder / "tmp").iterdir())
