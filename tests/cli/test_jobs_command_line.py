"""A job as a user starts it: what is said on stderr, and exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.cli.rendezvous_route import with_route
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.settings import Settings
from cpulaunch.system import routes

SAY = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"


def cpulaunch(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command, run in an empty folder with an environment of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cpulaunch", *arguments],
        env={"PATH": os.environ["PATH"], "HOME": str(folder / "home"), **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_torchrun_starts_one_rank_or_as_many_as_a_variable(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY)
    assert cpulaunch(tmp_path, "torchrun", "say.py").stdout == "0 1\n"
    more = cpulaunch(tmp_path, "say.py", PET_NPROC_PER_NODE="2")
    assert sorted(more.stdout.splitlines()) == ["0 2", "1 2"]


def test_a_flag_that_overrides_a_variable_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY)
    flags = ("--strict", "--profile", "none", "--allocator", "default", "--openmp", "default", "--nproc-per-node", "1")
    done = cpulaunch(tmp_path, *flags, "say.py", PET_NPROC_PER_NODE="2")
    assert (done.returncode, done.stdout) == (0, "0 1\n")
    assert done.stderr.splitlines() == [
        "cpulaunch: --nproc-per-node on the command line overrides PET_NPROC_PER_NODE=2 from the environment"
    ]


@pytest.mark.parametrize(
    ("arguments", "environ", "part"),
    [
        (["--nproc-per-node", "0", "say.py"], {}, "at least 1"),
        (["--node-rank", "1", "say.py"], {}, "no such host in the job"),
        (["--instances", "1", "--standalone", "say.py"], {}, "ranks (one job) together"),
        (["say.py"], {"PET_NODE_RANK": "3"}, "PET_NODE_RANK in the environment"),
    ],
)
def test_invalid_requests_are_an_error_of_two_lines(
    tmp_path: Path, arguments: list[str], environ: dict[str, str], part: str
) -> None:
    (tmp_path / "say.py").write_text(SAY)
    done = cpulaunch(tmp_path, *arguments, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("cpulaunch: error: ")
    assert part in first
    assert second.startswith("hint: ")


@pytest.mark.parametrize(("given", "waited"), [("20", 20.0), ("900", 60.0), ("x", 60.0), ("\u00b2", 60.0)])
def test_a_name_is_waited_for_as_long_as_hosts_may_join(
    monkeypatch: pytest.MonkeyPatch, given: str, waited: float
) -> None:
    """At most a minute; "\u00b2" is a digit that float() does not take."""
    found: list[float] = []
    monkeypatch.setattr(routes, "route_to", lambda *_, patience_seconds, **__: found.append(patience_seconds))
    settings = Settings(rdzv_endpoint="host:1", rdzv_conf=(("join_timeout", given),))
    request = LaunchRequest(
        program=None, settings=settings, origins={}, reasons={}, profile=None, profile_env=(), environ={}
    )
    with_route(request, wait_for_dns=True, notify=print)
    assert found == [waited]


def test_a_pipe_for_the_list_of_hosts_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts")
    (tmp_path / "say.py").write_text(SAY)
    pbs = {"PBS_JOBID": "7", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_NODEFILE": str(tmp_path / "hosts")}
    done = cpulaunch(tmp_path, "--scheduler", "pbs", "say.py", **pbs)
    assert done.returncode == 2
    assert "PBS_NODEFILE is not readable on this host" in done.stderr
