"""`--emit sh` of a job, run by a real sh without any tool that binds."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.cli.plan_script import plan_script
from cpulaunch.errors import UsageError
from cpulaunch.request import Program
from tests.plan.machines import machine, plan

HOST = machine(cores=4)
TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
sys.stdout.write(json.dumps({name: os.environ[name] for name in names}) + "\\n")
"""


def script(flags: str, code: str) -> str:
    program = Program(kind="command", target=sys.executable, args=("-c", code))
    # The script looks for a free port with the Python of its PATH: a command brings none of its own.
    return plan_script(plan(HOST, f"--binder none {flags}", program=program))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with python3 and env alone."""
    env = shutil.which("env")
    assert env is not None
    for name, target in (("python3", sys.executable), ("env", env)):
        (tmp_path / name).symlink_to(target)
    return str(tmp_path)


def run(text: str, path: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", text],
        env={"PATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda each: each["RANK"])


def test_all_ranks_start_with_their_variables_and_one_free_port(path: str) -> None:
    first, second = told(run(script("--nproc-per-node 2", TELL), path, RANK="9", MASTER_PORT="1"))
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["WORLD_SIZE"], second["LOCAL_RANK"]) == ("2", "1")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert 1024 < int(first["MASTER_PORT"]) < 65536
    assert first["TORCHELASTIC_RUN_ID"] == second["TORCHELASTIC_RUN_ID"]


def test_a_port_and_a_name_asked_for_are_kept(path: str) -> None:
    (only,) = told(run(script("--master-port 4321 --rdzv-id it's", TELL), path))
    assert (only["MASTER_PORT"], only["TORCHELASTIC_RUN_ID"]) == ("4321", "it's")


def test_the_first_rank_to_fail_ends_the_others_and_decides(path: str) -> None:
    code = "import os, signal, sys; sys.exit(5) if os.environ['RANK'] == '1' else signal.pause()"
    assert run(script("--nproc-per-node 3", code), path).returncode == 5


def test_a_signal_ends_all_ranks(path: str) -> None:
    code = "import signal; print('ready', flush=True); signal.pause()"
    text = script("--nproc-per-node 2", code)
    process = subprocess.Popen(["/bin/sh", "-c", text], env={"PATH": path}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.read() == ""
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_script_names_what_it_leaves_out() -> None:
    text = script("--nproc-per-node 2 --report r.json --log-dir logs --max-restarts 2 --redirects 1", "pass")
    (line,) = [line for line in text.splitlines() if line.startswith("# Not in this script")]
    for flag in ("--report", "--log-dir", "--max-restarts", "--redirects"):
        assert flag in line
    assert "Not in this script" not in script("--nproc-per-node 2", "pass")
    instances = plan(HOST, "--instances 2 --log-dir d", program=Program(kind="command", target="x"))
    assert "# Not in this script: --log-dir" in plan_script(instances)


def test_several_hosts_are_no_script() -> None:
    with pytest.raises(UsageError, match="one host"):
        script("--nnodes 2 --master-addr a", "pass")
