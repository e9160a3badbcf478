"""Real schedulers: a Slurm of its own for each script, and Open MPI's mpirun."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CLUSTER = ROOT / "scripts/slurm-cluster"
NOT_STARTED = 125
TIMEOUT = 280
OTHER_JOBS = (
    *("SLURM_", "SRUN_", "SALLOC_", "SBATCH_", "OMPI_", "PMI", "MPI_", "HYDRA_", "I_MPI_", "PET_", "TORCHELASTIC_"),
    *("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "OMP_", "GLOO_", "CUDA_"),
)
"""What names of variables begin with that would make these jobs part of another one, or other jobs."""


def environment(**more: str) -> dict[str, str]:
    """This process's environment without a job's variables, for `cpulaunch` by name."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OTHER_JOBS)}
    folder = os.path.dirname(sys.executable)
    return kept | {"PATH": f"{folder}:{kept.get('PATH', os.defpath)}", "PYTHONPATH": str(ROOT)} | more


def slurm(script: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A shell script run inside a new Slurm of two nodes with two CPUs each, in this folder. Skips without Slurm."""
    if os.geteuid() != 0:
        pytest.skip("needs root to start a Slurm of its own")
    done = subprocess.run(
        [CLUSTER, "--timeout", str(TIMEOUT - 20), "sh", "-c", script],
        cwd=folder,
        env=environment(TELL=str(HERE / "tell_place.py"), TRAIN=str(HERE / "train_ranks.py"), **environ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode == NOT_STARTED and done.stderr.startswith(("slurm-cluster: missing", "slurm-cluster: needs")):
        pytest.skip(done.stderr.strip())
    return done


def mpirun(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Two processes of a command under Open MPI. Skips where it is missing."""
    program = shutil.which("mpirun.openmpi") or (shutil.which("ompi_info") and shutil.which("mpirun"))
    if program is None:
        pytest.skip("no mpirun of Open MPI (as root: apt-get install openmpi-bin)")
    return subprocess.run(
        [program, "--allow-run-as-root", "--oversubscribe", "-np", "2", *command],
        env=environment(OMPI_MCA_plm_rsh_agent="sh", **environ),  # It insists on an ssh for other hosts.
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def answers(output: str) -> list[dict[str, Any]]:
    """What the ranks printed, by rank; lines of others are passed over."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"RANK"')]
    return sorted(found, key=lambda answer: int(answer["RANK"] or 0))


def processes_of(marker: str) -> list[str]:
    """Command lines of living processes that contain the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in words:
            found.append(words)
    return found
