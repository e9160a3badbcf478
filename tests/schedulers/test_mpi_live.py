"""Open MPI's own mpirun, two processes on this machine."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.schedulers.live import HERE, answers, mpirun, processes_of


def copied(name: str, folder: Path) -> str:
    """The program under a name of this test's own, by which its processes are known."""
    return shutil.copy(HERE / name, folder / name)


def test_processes_become_ranks_on_cpus_of_their_own(tmp_path: Path) -> None:
    for binding in ("core", "none"):
        done = mpirun("--bind-to", binding, "cpulaunch", "--from-mpi", copied("tell_place.py", tmp_path))
        assert done.returncode == 0, done.stderr
        first, second = answers(done.stdout)
        assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")
        assert not set(first["cpus"]) & set(second["cpus"])
        assert len(first["cpus"]) == int(first["OMP_NUM_THREADS"]) == len(second["cpus"])


def test_mpirun_returns_the_code_of_a_failed_rank(tmp_path: Path) -> None:
    done = mpirun("cpulaunch", "--from-mpi", copied("tell_place.py", tmp_path), FAILING_RANK="1")
    assert done.returncode == 7, done.stderr
    assert processes_of(str(tmp_path)) == []


def test_without_the_option_processes_are_independent(tmp_path: Path) -> None:
    done = mpirun("cpulaunch", copied("tell_place.py", tmp_path))
    assert done.returncode == 0, done.stderr
    assert [one["RANK"] for one in answers(done.stdout)] == [None, None], done.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_processes_train_together(tmp_path: Path) -> None:
    done = mpirun(sys.executable, "-m", "cpulaunch", "--from-mpi", copied("train_ranks.py", tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = answers(done.stdout)
    assert first["weights"] == second["weights"]
    assert first["learned"]
    assert not set(first["cpus"]) & set(second["cpus"])
    assert processes_of(str(tmp_path)) == []
