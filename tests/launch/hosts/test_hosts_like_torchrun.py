"""The same job on two hosts under torchrun and under cpulaunch: variables rank by rank, restarts, roles and logs."""

import json

import pytest
from two_hosts import HERE

pytestmark = [pytest.mark.root, pytest.mark.torch, pytest.mark.slow]

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("TORCH_CPP_LOG_LEVEL", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
)
DELIBERATE = {
    "static": {},
    # torchrun lets the hosts' names be the address, which needs a name service that knows them all.
    "c10d": {"MASTER_ADDR": "10.77.0.1"},
}
RANDOM = {"static": (), "c10d": ("MASTER_PORT",)}
"""Chosen anew in each run."""
MEETING = {
    "static": lambda number: ["--node-rank", number, "--master-addr", "10.77.0.1", "--master-port", 29511],
    "c10d": lambda number: ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29411", "--rdzv-id", "job-1"],
}


def by_place(network, launcher, backend, extra=()):
    """Each rank's variables, by host and local rank: under c10d the order of the hosts is random."""
    options = ["--nnodes", 2, "--nproc-per-node", 2, "--role", "trainer", *extra]
    command = [HERE / "show_variables.py", *VARIABLES]
    start = getattr(network, launcher)
    runs = []
    for number, host in enumerate(("a", "b")):
        # torch takes a host for the endpoint's only by its name, and its name for its address.
        helped = []
        if launcher == "torchrun" and backend == "c10d":
            helped = ["--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", f"10.77.0.{number + 1}"]
        runs.append(start(host, *options, *MEETING[backend](number), *helped, *command))
    assert [run.wait() for run in runs] == [0, 0], runs[0].err + runs[1].err
    found = {}
    for run in runs:
        for report in run.reports:
            found[report["GROUP_RANK"], report["LOCAL_RANK"]] = report
    assert len(found) == 4
    return found


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_every_rank_is_told_what_torchrun_tells_it(network, backend):
    theirs = by_place(network, "torchrun", backend)
    ours = by_place(network, "cpulaunch", backend)
    for place, variables in theirs.items():
        expected = {name: value for name, value in variables.items() if name not in RANDOM[backend]}
        found = {name: value for name, value in ours[place].items() if name not in RANDOM[backend]}
        if "MASTER_ADDR" in DELIBERATE[backend]:
            # Whichever host got the number 0 is the master, under both.
            assert found.pop("MASTER_ADDR") in ("10.77.0.1", "10.77.0.2")
            assert expected.pop("MASTER_ADDR") in ("10.77.0.1", "10.77.0.2")
        assert found == expected
    assert len({report["MASTER_PORT"] for report in ours.values()}) == 1


def test_two_roles_restart_together_and_leave_logs_where_torchrun_puts_them(network):
    logs = network.dir / "logs"
    options = ["--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 1, "-t", 3]
    script = HERE / "restarting_rank.py"
    a = network.cpulaunch("a", *options, *MEETING["static"](0), "--role", "reader", script)
    b = network.cpulaunch("b", *options, *MEETING["static"](1), "--role", "writer", "--log-dir", logs, script)
    assert (a.wait(), b.wait()) == (0, 0), a.err + b.err

    def reports(run, role):
        prefixes = tuple(f"[{role}{local_rank}]:" for local_rank in (0, 1))
        lines = [line for line in run.out.splitlines() if line.startswith(prefixes)]
        return [json.loads(line.partition(":")[2]) for line in lines]

    last = [each for each in reports(b, "writer") if each["TORCHELASTIC_RESTART_COUNT"] == "1"]
    assert sorted(each["RANK"] for each in last) == ["2", "3"]
    assert sorted(each["ROLE_RANK"] for each in last) == ["0", "1"]
    assert {each["ROLE_WORLD_SIZE"] for each in last} == {"2"}
    assert {each["ROLE_NAME"] for each in reports(a, "reader")} == {"reader"}
    (run_dir,) = logs.glob("none_*")
    names = sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*.*"))
    assert names == [
        *("attempt_0/0/stderr.log", "attempt_0/0/stdout.log"),
        *("attempt_0/1/error.json", "attempt_0/1/stderr.log", "attempt_0/1/stdout.log"),
        *("attempt_1/0/stderr.log", "attempt_1/0/stdout.log", "attempt_1/1/stderr.log", "attempt_1/1/stdout.log"),
    ]
    assert (run_dir / "attempt_1/1/stderr.log").read_text() == "to stderr, attempt 1\n"


def test_the_first_failed_rank_decides_and_is_told_with_its_traceback(network):
    options = ["--nnodes", 2, "--nproc-per-node", 2, HERE / "restarting_rank.py", "always"]
    a = network.cpulaunch("a", *MEETING["static"](0), *options)
    b = network.cpulaunch("b", *MEETING["static"](1), *options)
    assert (a.wait(), b.wait()) == (8, 7)
    assert "cpulaunch: rank 3 (local rank 1, pid " in b.err
    assert "exit code 7" in b.err
    assert "  Traceback: bad luck" in b.err
    assert "  to stderr, attempt 0" in b.err
    assert a.out.count("\n") == 2
    a.gone()
    b.gone()
    assert not list(network.dir.glob("cpulaunch-*"))
