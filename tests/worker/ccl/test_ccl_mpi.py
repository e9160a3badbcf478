"""The backend "ccl" in ranks that mpiexec of Intel MPI started: oneCCL connects them by TCP."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ccl_ranks import HERE, LIBRARY, environment, finish, free_port, start

MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec.hydra"
if LIBRARY is None or not MPIEXEC.exists() or find_spec("torch") is None:
    pytest.skip("torch, oneCCL and Intel MPI are not all installed: pip install torch oneccl", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROGRAM = str(HERE / "ccl_train.py")
DEADLINE_SECONDS = 300
RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture
def mpiexec():
    """Starts two ranks by mpiexec, which ends them when it is ended itself, at the deadline at the latest."""
    started = []

    def start_ranks(*arguments, **changes):
        inherited = {name: value for name, value in environment(2, free_port()).items() if name not in RANK_VARIABLES}
        launch = [sys.executable, "-m", "cpulaunch", "--from-mpi", PROGRAM, *arguments]
        command = ["timeout", str(DEADLINE_SECONDS), MPIEXEC, "-n", "2", *launch]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=inherited | changes, text=True, **pipes))
        return started[-1]

    yield start_ranks
    for process in started:
        process.terminate()
        process.communicate()


def finished(process):
    """The exit code, stdout and stderr of a process, after it has exited."""
    out, err = process.communicate()
    return process.returncode, out, err


def reports(out):
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"rank"')]
    return sorted(found, key=lambda report: report["rank"])


@pytest.fixture(scope="module")
def expected():
    """The losses of each rank over gloo."""
    results = finish(start(2, [PROGRAM, "gloo"]), DEADLINE_SECONDS)
    assert [code for code, _, _ in results] == [0, 0], results
    return [reports(out)[0]["losses"]["gloo"] for _, out, _ in results]


@pytest.mark.parametrize("path", ["oneccl", "auto"])
def test_losses_are_those_of_gloo(mpiexec, expected, path):
    code, out, err = finished(mpiexec("ccl", CPULAUNCH_CCL_PATH=path))
    assert code == 0, out + err
    ranks = reports(out)
    assert [rank["losses"]["ccl"] for rank in ranks] == [pytest.approx(losses, rel=1e-5) for losses in expected]


@pytest.mark.parametrize("fault", ["raises", "dies"])
def test_the_job_fails_when_a_rank_fails(mpiexec, fault):
    code, out, err = finished(mpiexec("ccl", "--fault", fault, CPULAUNCH_CCL_PATH="oneccl"))
    assert code not in (0, 125), out + err
    assert len(reports(out)) == 2
    assert ("this rank's own mistake" in err) == (fault == "raises")
