"""The same small jobs under torchrun and under cpulaunch: every rank sees and leaves the same, but for one table."""

import json
import sys

import pytest
from jobs import UUID, finish, free_port, knows_torchrun, run, start

pytestmark = [pytest.mark.slow, pytest.mark.torch]
since_2_13 = pytest.mark.skipif(
    not knows_torchrun("--shutdown-timeout"),
    reason="jobs are compared with the torchrun of torch 2.13; this is older",
)

TWO = ("--nproc-per-node", "2")
LOGS = ("--log-dir", "logs")
PORT = "PORT"
"""Stands for a port that is free when the test runs."""

JOBS = {
    "one rank": (("--nnodes", "1", "seen.py"), {}),
    "two ranks": ((*TWO, "seen.py", "--epochs", "3"), {}),
    "underscores and =": (("--nproc_per_node=2", "--max_restarts=1", "seen.py"), {}),
    "standalone": (("--standalone", *TWO, "seen.py"), {}),
    "static with a port": (("--master-port", PORT, *TWO, "seen.py"), {}),
    "static with an address": (("--master-addr", "localhost", "--master-port", PORT, *TWO, "seen.py"), {}),
    "static with an endpoint": (("--rdzv-endpoint", f"127.0.0.1:{PORT}", *TWO, "seen.py"), {}),
    "c10d on one host": (
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{PORT}", "--rdzv-id", "job7", *TWO, "seen.py"),
        {},
    ),
    "PET variables": (("seen.py",), {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "2", "PET_ROLE": "trainer"}),
    "a flag over a PET variable": ((*TWO, "seen.py"), {"PET_NPROC_PER_NODE": "1"}),
    "a module": ((*TWO, "-m", "seen", "x"), {}),
    "no python": ((*TWO, "--no-python", sys.executable, "seen.py", "x"), {}),
    "run path": ((*TWO, "--run-path", "seen.py", "x"), {}),
    "role and macros": (
        ("--role", "trainer", *TWO, "seen.py", "--at=${local_rank}", "$local_rank$$", "$LOCAL_RANK"),
        {},
    ),
    "redirected": (("-r", "3", *LOGS, *TWO, "seen.py"), {}),
    "teed": (("-t", "3", *LOGS, *TWO, "seen.py"), {}),
    "by rank": (("-r", "0:1,1:2", "-t", "1:1", *LOGS, *TWO, "seen.py"), {}),
    "own prefix": (
        ("-t", "3", "--role", "r", *LOGS, *TWO, "seen.py"),
        {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} $rank/${local_rank}> "},
    ),
    "filtered": (
        (
            *("-t", "3", "--duplicate-stdout-filters", "of 1,none", "--duplicate-stderr-filters", "err"),
            *(*LOGS, *TWO, "seen.py"),
        ),
        {},
    ),
    "one rank shown": (("--local-ranks-filter", "1", *TWO, "seen.py"), {}),
    "one rank shown of two teed": (
        ("-t", "3", "--local-ranks-filter", "0", "--duplicate-stdout-filters", "out", *LOGS, *TWO, "seen.py"),
        {},
    ),
    "nothing written": (("-t", "3", "--log-dir", "/dev/null", *TWO, "seen.py"), {}),
    "a failure": ((*TWO, "seen.py", "fail=1:3:9"), {}),
    "restarts": (("--max-restarts", "2", "-r", "3", *LOGS, *TWO, "seen.py", "fail=1:3:2"), {}),
    "restarts exhausted": (("--max-restarts", "1", *TWO, "seen.py", "fail=0:3:9"), {}),
    "virtual local rank": (("--virtual-local-rank", *TWO, "seen.py"), {}),
    "virtual local rank of chosen GPUs": (("--virtual-local-rank", *TWO, "seen.py"), {"CUDA_VISIBLE_DEVICES": "5,3"}),
    "signals": (("--signals-to-handle", "SIGTERM,SIGUSR1", *TWO, "seen.py"), {}),
    "the user's variables": (
        (*TWO, "seen.py"),
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "OMP_NUM_THREADS": "1", "MASTER_PORT": "1", "RANK": "7"},
    ),
}

DIFFERENT = {
    "TORCHELASTIC_USE_AGENT_STORE": "torchrun's agent hosts the store; cpulaunch has no torch, so rank 0 does",
    "OMP_NUM_THREADS": "torchrun sets 1 for every rank of several; cpulaunch the rank's cores",
    "TMPDIR": "the test's own folders",
    "SEEN": "the test's own folders",
    "PWD": "the test's own folders",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "torchrun's note to itself; nothing in a rank reads it",
}
"""Variables that may differ, and why."""
ALIKE = {
    "MASTER_ADDR": lambda value: "loopback" if value in ("localhost", "127.0.0.1") else value,
    "MASTER_PORT": lambda value: "a port" if value.isdigit() and 1023 < int(value) < 65536 else value,
    "TORCHELASTIC_RUN_ID": lambda value: UUID.sub("a UUID", value),
    "TORCHELASTIC_ERROR_FILE": lambda value: value and value.split("/")[-3:],
}
"""Variables that are random in part, and what of them is compared where no option decides them."""
ONLY_CPULAUNCH = {
    "CPULAUNCH_WORKER": "settings for inside torch",
    "LD_PRELOAD": "the allocator and the OpenMP runtime",
    "MKL_NUM_THREADS": "the rank's cores",
    "OMP_SCHEDULE": "tuning",
    "KMP_BLOCKTIME": "tuning",
    "KMP_AFFINITY": "tuning",
    "MALLOC_CONF": "tuning",
    "MKL_ENABLE_INSTRUCTIONS": "tuning",
    "TORCHINDUCTOR_COMPILE_THREADS": "torch.compile's own processes share the rank's cores",
    "TORCHINDUCTOR_CACHE_DIR": "what is compiled for some machine stays with it",
    "GLOO_SOCKET_IFNAME": "all ranks are on this host",
    "TP_SOCKET_IFNAME": "all ranks are on this host",
}
"""Variables that only cpulaunch sets, and why."""
EXIT_CODES = "torchrun ends with 1 whatever the ranks ended with; cpulaunch with the first failing rank's code"


def decides_port(options):
    """Whether the ranks' port is the one asked for: c10d's endpoint is where torchrun's agents meet, not the ranks."""
    return PORT in " ".join(options) and "c10d" not in options


def compared(environ, options):
    """The variables of a rank as both tools should give them."""
    exact = ("MASTER_PORT",) if decides_port(options) else ()
    return {
        name: ALIKE[name](value) if name in ALIKE and name not in exact else value
        for name, value in environ.items()
        if name not in DIFFERENT and name not in ONLY_CPULAUNCH
    }


@since_2_13
@pytest.mark.parametrize("name", JOBS)
def test_ranks_see_and_leave_the_same(folders, name):
    options, env = JOBS[name]
    port = free_port()
    arguments = [option.replace(PORT, port) for option in options]
    theirs, ours = (run(tool, folder, arguments, env=env) for tool, folder in folders.items())
    assert (ours.code == 0) == (theirs.code == 0), (EXIT_CODES, ours.err, theirs.err)
    assert ours.seen.keys() == theirs.seen.keys(), (ours.err, theirs.err)
    for rank, seen in theirs.seen.items():
        assert compared(ours.seen[rank]["env"], options) == compared(seen["env"], options)
        assert argv(ours.seen[rank]) == argv(seen)
        assert ours.seen[rank]["name"] == seen["name"]
    assert ours.out == theirs.out
    assert error_lines(ours) == error_lines(theirs)
    assert ours.files == theirs.files


def argv(seen):
    """The arguments, without the test's own folder in the path that Python makes of a module."""
    return [word.removeprefix(f"{seen['cwd']}/") for word in seen["argv"]]


def error_lines(job):
    """The ranks' lines on stderr; each tool has its own beside them."""
    return sorted(line for line in job.err.splitlines() if "err of" in line and not line.startswith("  "))


@pytest.mark.parametrize(("options", "code"), [((), 3), (("--max-restarts", "1"), 3)])
def test_the_exit_code_is_the_failing_ranks(folders, options, code):
    ours = run("cpulaunch", folders["cpulaunch"], [*options, *TWO, "seen.py", "fail=1:3:9"])
    assert ours.code == code, EXIT_CODES


@since_2_13
def test_jobs_at_once_have_ports_of_their_own(folders):
    ports = {}
    for tool, folder in folders.items():
        parts = [folder / str(number) for number in range(3)]
        started = [start(tool, part, [*TWO, str(folder / "seen.py")]) for part in parts]
        ended = [finish(process, part) for process, part in zip(started, parts, strict=True)]
        assert [job.code for job in ended] == [0, 0, 0]
        ports[tool] = [{seen["env"]["MASTER_PORT"] for seen in job.seen.values()} for job in ended]
        assert all(len(each) == 1 for each in ports[tool])
    assert len(set.union(*ports["cpulaunch"])) == len(set.union(*ports["torchrun"])) == 3


RECORDED = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("no such layer")

main()
"""


@since_2_13
def test_recorded_errors_are_shown(folders):
    boxes = {}
    for tool, folder in folders.items():
        (folder / "recorded.py").write_text(RECORDED)
        boxes[tool] = run(tool, folder, [*LOGS, "-r", "3", *TWO, "recorded.py"])
        (path,) = (folder / "logs").rglob("error.json")
        message = json.loads(path.read_text())["message"]
        assert path.parts[-3:] == ("attempt_0", "1", "error.json")
        assert message["message"] == "ValueError: no such layer"
        assert "ValueError: no such layer" in boxes[tool].err
        assert "recorded.py" in boxes[tool].err
    ours, theirs = boxes["cpulaunch"], boxes["torchrun"]
    assert (ours.code, theirs.code) == (1, 1)
    assert ours.files.keys() == theirs.files.keys()
    assert "rank 1 (local rank 1" in ours.err


@pytest.mark.parametrize("program", ["recorded.py", "seen.py"])
def test_a_launch_copies_its_first_failure_to_its_own_error_file(folders, program):
    """Schedulers set the launcher's own error file, and read there why the job failed."""
    recorded = {}
    for tool, folder in folders.items():
        (folder / "recorded.py").write_text(RECORDED)
        why = folder / "why.json"
        job = run(tool, folder, [*TWO, program, "fail=1:3:9"], env={"TORCHELASTIC_ERROR_FILE": str(why)})
        assert job.code
        recorded[tool] = json.loads(why.read_text())["message"] if why.exists() else None
    ours, theirs = recorded["cpulaunch"], recorded["torchrun"]
    if program == "seen.py":
        assert ours is theirs is None
        return
    assert (ours["message"], ours["errorCode"]) == (theirs["message"], theirs["errorCode"])
    assert ours["extraInfo"].keys() == theirs["extraInfo"].keys()
