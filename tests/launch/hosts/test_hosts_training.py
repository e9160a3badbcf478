"""DDP over gloo on four ranks of two hosts: static, c10d, and elastic with hosts that come and go."""

import json
import subprocess
import sys

import pytest
from two_hosts import HERE, LEAKY, ROOT, eventually

from tests import json_output

pytestmark = [pytest.mark.root, pytest.mark.torch, pytest.mark.slow]

TRAIN = HERE / "train_job.py"


@pytest.fixture(scope="module")
def planned():
    """The CPUs planned for each local rank of two."""
    import os

    env = {name: value for name, value in os.environ.items() if name not in LEAKY} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cpulaunch", "plan", "--json", "--nproc-per-node", "2", str(TRAIN)]
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return [worker["cpus"] for worker in json_output.read("plan", made.stdout)["workers"]]


def cpulist(cpus):
    from cpulaunch.records.cpulist import format_cpulist

    return format_cpulist(frozenset(cpus))


MEETING = {
    "static": lambda number: ["--node-rank", number, "--master-addr", "10.77.0.1"],
    "c10d": lambda number: ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29400"],
}


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_four_ranks_on_two_hosts_train_together_each_where_it_was_planned(network, planned, backend):
    options = ["--nnodes", 2, "--nproc-per-node", 2]
    a = network.cpulaunch("a", *options, *MEETING[backend](0), TRAIN, network.dir, 60)
    b = network.cpulaunch("b", *options, *MEETING[backend](1), TRAIN, network.dir, 60)
    assert (a.wait(), b.wait()) == (0, 0), a.err + b.err
    ranks = sorted(a.reports + b.reports, key=lambda report: report["rank"])
    assert [report["rank"] for report in ranks] == [0, 1, 2, 3]
    assert {report["world"] for report in ranks} == {4}
    assert len({tuple(report["weights"]) for report in ranks}) == 1
    assert all(report["last"] < report["first"] / 4 for report in ranks)
    assert [cpulist(report["cpus"]) for report in ranks] == [planned[report["local_rank"]] for report in ranks]
    assert {report["interface"] for report in ranks} == {"up0"}
    assert {report["threads"] for report in ranks} == {len(ranks[0]["cpus"])}
    a.gone()
    b.gone()
    assert not list(network.dir.glob("cpulaunch-*"))


def test_an_elastic_job_takes_a_late_host_loses_it_and_takes_another(network):
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8,join_timeout=60"
    options = ["--nnodes", "1:2", "--nproc-per-node", 2, "--max-restarts", 3, "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", "10.77.0.1:29400", "--rdzv-conf", conf, "--grace", 10, TRAIN, network.dir]
    progress = network.dir / "progress"

    def started(run, world):
        lines = progress.read_text().splitlines() if progress.exists() else []
        seen = [fact for line in lines if (fact := json.loads(line))["run"] == run.mark and fact["world"] == world]
        return len(seen) >= 2 and seen

    a = network.cpulaunch("a", *options)
    eventually(lambda: started(a, 2), f"two ranks on one host: {a.err}")
    late = network.cpulaunch("b", *options)
    eventually(lambda: started(late, 4), f"four ranks on two hosts: {late.err}")
    late.kill()
    late.gone()
    another = network.cpulaunch("b", *options)
    eventually(lambda: started(another, 4), f"four ranks again: {a.err} {another.err}")
    (network.dir / "stop").touch()
    assert (a.wait(), another.wait()) == (0, 0), a.err + another.err
    final = a.reports + another.reports
    assert sorted(report["rank"] for report in final) == [0, 1, 2, 3]
    assert len({tuple(report["weights"]) for report in final}) == 1
    alone = started(a, 2)
    assert {fact["restarts"] for fact in alone[:2]} == {0}
    assert max(report["restarts"] for report in a.reports) >= 1
    assert all(report["last"] < 1 for report in final)  # It went on from the checkpoint: the first loss is above 50.


def test_a_killed_launcher_leaves_nothing_on_its_host_and_ends_the_other(network):
    options = ["--nnodes", 2, "--nproc-per-node", 1, "--grace", 5]
    a = network.cpulaunch("a", *options, *MEETING["static"](0), TRAIN, network.dir)
    b = network.cpulaunch("b", *options, *MEETING["static"](1), TRAIN, network.dir)
    eventually(lambda: (network.dir / "progress").exists(), f"a first step: {a.err} {b.err}")
    b.kill()
    b.gone()
    assert a.wait() not in (0, 125), a.err
    assert "rank" in a.err or "worker" in a.err
    a.gone()
    assert not list(network.dir.glob("cpulaunch-*"))
