"""Two ranks train one model with gloo, bound as planned, to the same result as under torchrun."""

import json
import shutil
import subprocess
import sys

import pytest
from jobs import HERE, run

from cpulaunch.records.cpulist import parse_cpulist
from tests import json_output

pytestmark = [pytest.mark.slow, pytest.mark.torch]
TWO = ("--nproc-per-node", "2")


def trained(tool, folder, *options):
    """What each rank wrote after a training."""
    shutil.copy(HERE / "training.py", folder)
    job = run(tool, folder, [*options, *TWO, "training.py", "result"])
    assert job.code == 0, job.err
    return [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(2)]


def planned_cpus(folder, *options):
    command = [sys.executable, "-m", "cpulaunch", "plan", "--json", *options, *TWO, "training.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=300, check=True)
    plan = json_output.read("plan", done.stdout)
    return [sorted(parse_cpulist(worker["cpus"])) for worker in plan["workers"]]


def test_ranks_train_as_under_torchrun(folders):
    ours, theirs = trained("cpulaunch", folders["cpulaunch"]), trained("torchrun", folders["torchrun"])
    for result in (*ours, *theirs):
        assert result["losses"][-1] < result["losses"][0] / 4
        assert result["losses"] == pytest.approx(theirs[0]["losses"], rel=1e-5)
        assert result["weights"][0] == pytest.approx(theirs[0]["weights"][0], rel=1e-5)


def test_ranks_train_where_the_plan_put_them(folders):
    folder = folders["cpulaunch"]
    ranks = trained("cpulaunch", folder)
    assert [rank["cpus"] for rank in ranks] == planned_cpus(folder)


def test_a_training_goes_on_after_a_restart(folders):
    folder = folders["cpulaunch"]
    (folder / "training.py").write_text(
        "import os\n"
        'if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":\n'
        "    raise SystemExit(9)\n" + (HERE / "training.py").read_text()
    )
    job = run("cpulaunch", folder, ["--max-restarts", "1", *TWO, "training.py", "result"])
    assert job.code == 0, job.err
    assert (folder / "result.1.json").exists()
