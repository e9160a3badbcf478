"""A real Slurm on this machine: two nodes of two CPUs, started and ended by scripts/slurm-cluster."""

import shutil
from pathlib import Path

import pytest

from tests import json_output
from tests.schedulers.live import HERE, answers, slurm

pytestmark = pytest.mark.root


def test_tasks_of_a_host_become_bound_ranks(tmp_path: Path) -> None:
    done = slurm(
        """
        srun -N1 -n2 cpulaunch $TELL
        echo unbound; srun -N1 -n2 --cpu-bind=none cpulaunch $TELL
        echo hosts; srun -N2 -n4 --ntasks-per-node=2 cpulaunch $TELL
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    bound, _, rest = done.stdout.partition("unbound")
    unbound, _, hosts = rest.partition("hosts")
    for output in (bound, unbound):
        told = answers(output)
        assert [one["RANK"] for one in told] == ["0", "1"]
        assert [one["cpus"] for one in told] == [[0], [1]]
        assert {one["OMP_NUM_THREADS"] for one in told} == {"1"}
        assert {one["MASTER_ADDR"] for one in told} == {"127.0.0.1"}
    told = answers(hosts)
    assert [(one["LOCAL_RANK"], one["host"]) for one in told] == [("0", "n1"), ("1", "n1"), ("0", "n2"), ("1", "n2")]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) for one in told} == {("4", "2", "n1")}
    assert [one["cpus"] for one in told] == [[0], [1]] * 2
    # The way to 10.0.0.1 inside the cluster: an address that `lo` has under a label.
    assert {one["GLOO_SOCKET_IFNAME"].partition(":")[0] for one in told} == {"lo"}


def test_shells_of_an_allocation_are_not_tasks(tmp_path: Path) -> None:
    (tmp_path / "batch.sh").write_text(
        "#!/bin/sh\ncpulaunch plan --json --nproc-per-node 2 $TELL >batch.json\necho $? >code\n"
    )
    done = slurm(
        """
        mkfifo code
        salloc --quiet -N2 cpulaunch plan --json --nproc-per-node 2 $TELL >salloc.json
        sbatch --quiet -N2 -n2 -c2 batch.sh
        read code <code
        exit $code
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for name in ("salloc.json", "batch.json"):
        plan = json_output.read("plan", (tmp_path / name).read_text())
        assert (plan["world_size"], [worker["rank"] for worker in plan["workers"]]) == (2, [0, 1]), name
        assert "scheduler" not in {note["setting"] for note in plan["notes"]}


def test_a_warning_about_a_task_on_a_single_cpu(tmp_path: Path) -> None:
    done = slurm("salloc --quiet -n1 -c2 srun -n1 -c1 --exact cpulaunch --nproc-per-node 1 $TELL", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Slurm bound this task to a single one of the job's 2 CPUs" in done.stderr
    assert "srun --cpus-per-task=2" in done.stderr
    assert answers(done.stdout)[0]["cpus"] == [0]


LEFT = 'import os; from tests.schedulers.live import processes_of; print(len(processes_of(os.environ["MARKER"])))'


def test_srun_returns_the_code_of_a_failed_rank(tmp_path: Path) -> None:
    program = shutil.copy(HERE / "tell_place.py", tmp_path / "known_by_its_path.py")
    (tmp_path / "left.py").write_text(LEFT)
    script = "srun -N1 -n2 cpulaunch $PROGRAM; echo code $?; python3 left.py"
    done = slurm(script, tmp_path, FAILING_RANK="1", PROGRAM=str(program), MARKER="known_by_its_path.py")
    assert done.stdout.splitlines()[-2:] == ["code 7", "0"], done.stdout + done.stderr


WAIT = """
import signal, sys
with open("ready", "w") as fifo:
    fifo.write("x")
signal.pause()
"""


def test_a_cancelled_job_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "wait_here.py").write_text(WAIT)
    (tmp_path / "left.py").write_text(LEFT)
    done = slurm(
        """
        mkfifo ready
        srun -N1 -n1 -c2 --job-name=waiting cpulaunch --nproc-per-node 2 $MARKER &
        head -c 2 <>ready >/dev/null
        scancel --name=waiting
        wait $!
        python3 left.py
        """,
        tmp_path,
        MARKER="wait_here.py",
    )
    assert done.stdout == "0\n", done.stdout + done.stderr


def test_scheduler_none_leaves_tasks_alone(tmp_path: Path) -> None:
    done = slurm("srun -N1 -n2 --cpu-bind=none cpulaunch --scheduler none $TELL", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(one["RANK"], one["cpus"]) for one in answers(done.stdout)] == [(None, [0, 1])] * 2, done.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_two_tasks_of_one_host_train_together(tmp_path: Path) -> None:
    done = slurm("srun -N1 -n2 cpulaunch $TRAIN", tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = answers(done.stdout)
    assert first["weights"] == second["weights"]
    assert first["learned"]
    assert (first["cpus"], second["cpus"]) == ([0], [1])


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("options", ["", "--nnodes 1:2 --rdzv-conf last_call_timeout=60,join_timeout=120"])
def test_two_hosts_train_together(tmp_path: Path, options: str) -> None:
    done = slurm(f"srun -N2 -n2 -c2 cpulaunch --nproc-per-node 1 {options} $TRAIN", tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = answers(done.stdout)
    assert {first["host"], second["host"]} == {"n1", "n2"}
    assert first["weights"] == second["weights"]
    assert first["learned"]
    for rank in (first, second):
        assert (rank["cpus"], rank["omp"], rank["threads"]) == ([0, 1], "2", 2)
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("2", "1")


@pytest.mark.slow
@pytest.mark.torch
def test_a_failing_rank_ends_the_job_on_both_hosts(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(LEFT)
    script = "srun -N2 -n2 cpulaunch --nproc-per-node 1 $TRAIN; echo code $?; python3 left.py"
    done = slurm(script, tmp_path, FAILING_RANK="1", MARKER="train_ranks.py")
    assert done.stdout.splitlines()[-2:] == ["code 7", "0"], done.stdout + done.stderr
