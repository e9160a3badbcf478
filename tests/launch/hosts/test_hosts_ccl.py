"""The backend "ccl" between two machines: oneCCL over libfabric's TCP, on the interface of the way to the other."""

import json
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from two_hosts import HERE

if not list(Path(sys.prefix).glob("lib/libccl.so.2")) or find_spec("torch") is None:
    pytest.skip("torch and oneCCL are not both installed: pip install torch oneccl", allow_module_level=True)

pytestmark = [pytest.mark.root, pytest.mark.torch, pytest.mark.slow]

CCL = HERE.parents[1] / "worker" / "ccl"
TENSOR_BYTES = 1 << 20
REPORT = '{"rank"'


def rank_of(report):
    return report["rank"]


def meeting(number):
    return ["--nnodes", 2, "--node-rank", number, "--master-addr", "10.77.0.1"]


def both(machines, *arguments, env=None):
    """The runs on both hosts, of one job."""
    return [machines.cpulaunch(host, *meeting(number), *arguments, env=env) for number, host in enumerate("ab")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hosts_train_over_tcp_as_gloo_does(machines, ranks):
    runs = both(machines, "--nproc-per-node", ranks, CCL / "ccl_train.py", "ccl", "gloo", env={"CCL_LOG_LEVEL": "info"})
    codes = [run.wait() for run in runs]
    said = "".join(run.out + run.err for run in runs)
    assert codes == [0, 0], said
    reports = sorted((json.loads(line) for line in said.splitlines() if line.startswith(REPORT)), key=rank_of)
    world = 2 * ranks
    assert [report["rank"] for report in reports] == list(range(world))
    assert all(report["sum"] == [sum(range(world))] for report in reports)
    assert all(each["losses"]["ccl"] == pytest.approx(each["losses"]["gloo"], rel=1e-5) for each in reports)
    assert all(report["received"] >= TENSOR_BYTES / 2 for report in reports[::ranks]), reports
    assert f"global [ idx 0, cnt {world} ], local [ idx 0, cnt {ranks} ]" in said
    assert "nic: { name tcp:up0" in said
    for run in runs:
        run.gone()


def test_every_collective_between_hosts_is_gloos(machines):
    runs = both(machines, "--nproc-per-node", 2, CCL / "ccl_program.py", "ccl_checks")
    codes = [run.wait() for run in runs]
    said = dict(json.loads(line) for line in runs[0].out.splitlines() if line.startswith('["'))
    assert codes == [0, 0], "".join(run.err for run in runs)
    assert {name: text for name, text in said.items() if text != "ok"} == {}
    assert said["different_calls_raise_in_all_ranks"] == "ok"


FAULTS = [("dies_before", 128 + signal.SIGKILL), ("dies_within", 128 + signal.SIGKILL), ("leaves", 0)]


@pytest.mark.parametrize(("fault", "code"), FAULTS)
def test_the_other_host_learns_that_a_rank_has_ended(machines, fault, code):
    runs = both(machines, "--nproc-per-node", 1, CCL / "ccl_faulty.py", fault)
    assert [run.wait() for run in runs] == [1, code], "".join(run.err for run in runs)
    assert "PeerLostError: rank 1 of the group" in runs[0].out
    for run in runs:
        run.gone()


def test_the_other_host_learns_that_a_rank_ends_while_it_joins(machines):
    runs = both(machines, "--nproc-per-node", 1, CCL / "ccl_faulty.py", "dies_during_setup")
    assert [run.wait() for run in runs] == [1, 128 + signal.SIGKILL], "".join(run.err for run in runs)
    assert "PeerLostError: rank 1 of the group" in runs[0].err
