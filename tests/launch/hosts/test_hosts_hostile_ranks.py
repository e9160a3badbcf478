"""What ranks do to torch's agent, and leave in the run's directory for the next attempt, changes no end."""

import json
import os
import signal
import subprocess
import sys

import pytest

from cpulaunch.launch.hosts import shim
from cpulaunch.launch.hosts.agent.config import make_logs_specs
from cpulaunch.launch.hosts.agent.files import agent_pipe, rank_config_file
from cpulaunch.launch.hosts.agent.messages import AgentConfig, RankConfig, RankPipe, write_message
from cpulaunch.launch.hosts.shim import FAILED
from cpulaunch.records.plan import JobPlan, Rendezvous, StreamsPlan
from cpulaunch.system.libc import is_linux
from tests.strangers import UID, needs_root

SIGNALLED = """
import os, signal
from cpulaunch.launch.hosts.agent.main import start_exit_thread
before = set(os.listdir("/proc/self/fd"))
signal.signal(signal.SIGTERM, lambda *_: None)
start_exit_thread()
for name in set(os.listdir("/proc/self/fd")) - before:
    try:
        os.write(os.open(f"/proc/self/fd/{name}", os.O_WRONLY | os.O_NONBLOCK), b"\\xc8")
    except OSError:
        continue
os.kill(os.getpid(), signal.SIGTERM)
while True:
    signal.pause()
"""


@pytest.mark.skipif(not is_linux(), reason="pipes can be opened through /proc on Linux alone")
def test_what_a_rank_writes_into_the_pipes_of_the_agent_is_no_signal():
    done = subprocess.run([sys.executable, "-c", SIGNALLED], check=False, timeout=60)
    assert done.returncode == 128 + 15


@pytest.mark.torch
def test_an_endless_error_file_is_not_read_to_its_end(tmp_path):
    """torch would read all of it, and its agent fail for want of memory."""
    from cpulaunch.launch.hosts.agent.failures import RecordedFailure

    error_file = tmp_path / "error.json"
    error_file.write_text('{"message": "no", "timestamp": 5}')
    os.truncate(error_file, 1 << 40)
    assert RecordedFailure(local_rank=0, pid=7, exitcode=3, error_file=str(error_file)).recorded is None


LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.torch
@pytest.mark.skipif(not is_linux(), reason="only Linux has leases")
def test_an_error_file_on_which_a_process_has_a_lease_is_not_waited_for(tmp_path):
    from cpulaunch.launch.hosts.agent.failures import RecordedFailure

    error_file = tmp_path / "error.json"
    error_file.write_text('{"message": "no", "timestamp": 5}')
    with subprocess.Popen(
        [sys.executable, "-c", LEASE, error_file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        failure = RecordedFailure(local_rank=0, pid=7, exitcode=3, error_file=str(error_file))
        holder.stdin.close()
    assert "no" not in (failure.message, failure.error_file_data.get("message"))


@pytest.mark.torch
@pytest.mark.parametrize(("forged", "timestamp"), [("other", 1), ("own", 1 << 32)], ids=["earlier", "later"])
def test_a_rank_cannot_have_another_fail_before_it_by_a_forged_error_file(tmp_path, forged, timestamp):
    """torch's agent ends the others by SIGTERM: the one with the earliest time is told as the cause."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from cpulaunch.launch.hosts.agent.failures import RecordedFailure, count_attempts, job_report

    specs = count_attempts(DefaultLogsSpecs())
    specs.reify({0: {"RANK": "0", "TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": "0"}})
    (tmp_path / forged).write_text(json.dumps({"message": "forged", "timestamp": timestamp}))

    def run():
        own = RecordedFailure(local_rank=0, pid=7, exitcode=3, error_file=str(tmp_path / "own"))
        other = RecordedFailure(local_rank=1, pid=8, exitcode=-15, error_file=str(tmp_path / "other"))
        raise ChildFailedError("train.py", {0: own, 1: other})

    report = job_report(run, logs_specs=specs)
    assert (report.exit_code, [each.rank for each in report.failures]) == (3, [0, 1])


@pytest.mark.torch
@pytest.mark.parametrize(
    ("codes", "restarted", "status"), [((), False, 0), ((3, -15), False, 3), ((-9,), False, 137), ((3,), True, 0)]
)
def test_a_host_that_the_job_did_not_need_has_succeeded_only_if_no_rank_of_its_last_attempt_failed(
    codes, restarted, status
):
    """A rank can put its own host among those in the state of the rendezvous, and then fail."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from cpulaunch.launch.hosts.agent.failures import RecordedFailure, count_attempts, job_report

    specs = count_attempts(DefaultLogsSpecs())
    attempts = [
        {0: {"RANK": "0", "TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": str(each)}} for each in range(2)
    ]
    specs.reify(attempts[0])
    for rank, code in enumerate(codes):
        RecordedFailure(local_rank=rank, pid=7, exitcode=code, error_file="")
    if restarted:
        specs.reify(attempts[1])

    def run():
        None.is_failed()

    assert job_report(run, logs_specs=specs).exit_code == status


@pytest.mark.torch
@pytest.mark.parametrize(("codes", "restarted", "status"), [((), False, 143), ((3,), False, 3), ((3,), True, 143)])
def test_a_signal_ends_a_job_with_the_code_of_a_rank_that_has_failed_before_in_its_attempt(codes, restarted, status):
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    from cpulaunch.launch.hosts.agent.failures import RecordedFailure, count_attempts, job_report

    specs = count_attempts(DefaultLogsSpecs())
    env = {"RANK": "4", "TORCHELASTIC_RUN_ID": "one"}
    specs.reify({0: env | {"TORCHELASTIC_RESTART_COUNT": "0"}})
    for code in codes:
        RecordedFailure(local_rank=0, pid=7, exitcode=code, error_file="")
    if restarted:
        specs.reify({0: env | {"TORCHELASTIC_RESTART_COUNT": "1"}})

    def run():
        raise SignalException("ended", signal.SIGTERM)

    report = job_report(run, logs_specs=specs)
    assert (report.exit_code, [each.rank for each in report.failures]) == (status, [4] if status == 3 else [])


@pytest.mark.torch
def test_the_attempt_is_told_whoever_places_the_logs(tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from cpulaunch.launch.hosts.agent.failures import RecordedFailure, job_report

    job = JobPlan(
        engine="elastic",
        hosts=(1, 1),
        host_rank=0,
        local_world_size=1,
        role="default",
        rendezvous=Rendezvous(backend="c10d", endpoint="localhost:0", id="one"),
        master_addr="localhost",
        master_port=None,
        max_restarts=3,
        streams=StreamsPlan(redirects=(0,), tee=(0,)),
        logs_specs="default",
    )
    specs = make_logs_specs(
        AgentConfig(job=job, log_dir=str(tmp_path), shown=None, grace_seconds=30.0, shim=("python",))
    )
    for restarts in range(3):
        specs.reify({0: {"RANK": "0", "TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": str(restarts)}})

    def run():
        raise ChildFailedError("train.py", {0: RecordedFailure(local_rank=0, pid=7, exitcode=3, error_file="")})

    assert job_report(run, logs_specs=specs).restarts == 2


def become(directory):
    """How the shim of the local rank 0 ended."""
    command = [sys.executable, "-I", "-S", shim.__file__, str(directory), "0", str(os.getpid())]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("forged", ["[", "5", '{"record": "RankConfig", "path": 5}', '{"record": []}', "[" * 100_000])
def test_a_rank_whose_command_was_overwritten_is_one_error(tmp_path, forged):
    with open(rank_config_file(str(tmp_path), 0), "w") as file:
        file.write(forged)
    done = become(tmp_path)
    assert done.returncode == 125
    assert done.stderr.startswith("cpulaunch: error: cannot read what this rank is to run: ")
    assert done.stderr.count("\n") == 2


def test_a_rank_whose_pipe_is_gone_is_one_error(tmp_path):
    pipe = RankPipe(descriptor=1, path=str(tmp_path / "gone"), agent_path=agent_pipe(str(tmp_path), 1))
    write_message(rank_config_file(str(tmp_path), 0), RankConfig(path="/bin/true", argv=("true",), pipes=(pipe,)))
    done = become(tmp_path)
    assert done.returncode == 125
    assert done.stderr.startswith("cpulaunch: error: cannot write the output of this rank: ")
    assert done.stderr.count("\n") == 2


@needs_root
def test_a_rank_executes_no_configuration_of_another_user(tmp_path, capfd):
    """Who made the run's directory again, after something had removed it."""
    path = rank_config_file(str(tmp_path), 0)
    write_message(path, RankConfig(path="/bin/true", argv=("true",)))
    os.chown(tmp_path, UID, UID)
    assert shim.main((str(tmp_path), "0", str(os.getppid()))) == FAILED
    assert "another user" in capfd.readouterr().err


def test_a_rank_executes_no_configuration_in_a_folder_of_this_user_that_others_may_write(tmp_path):
    """Who can rename what is in TMPDIR may have put it in place of the run's directory."""
    write_message(rank_config_file(str(tmp_path), 0), RankConfig(path="/bin/true", argv=("true",)))
    os.chmod(tmp_path, 0o777)
    done = become(tmp_path)
    assert done.returncode == FAILED
    assert "other users may use" in done.stderr
