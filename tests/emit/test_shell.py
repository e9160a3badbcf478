"""`--emit sh`, run by a real sh; numactl and taskset are stand-ins that record their arguments."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.emit.shell import plan_script
from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import Program
from cpulaunch.records.torch_settings import decode
from tests.plan.machines import libraries, machine, plan

HOST = machine(sockets=2, cores=2)
ODD = ("a b", "$HOME", "*", "it's", 'say "x"', "new\nline", "", "-n", "\\")
PRINT_ARGV_AND_ENVIRON = "import json,os,sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def python(code: str, *args: str) -> Program:
    return Program(kind="command", target=sys.executable, args=("-c", code, *args))


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A directory for PATH with what a script may call: stand-ins for numactl and taskset."""
    folder = tmp_path / "bin"
    folder.mkdir()
    env = shutil.which("env")
    assert env is not None
    (folder / "env").symlink_to(env)
    for name, skipped in (("numactl", 2), ("taskset", 2)):
        tool = folder / name
        tool.write_text(f'#!/bin/sh\necho "{name} $1 $2" >>{tmp_path}/calls\nshift {skipped}\n' + _SKIP_MEMORY)
        tool.chmod(0o755)
    return folder


_SKIP_MEMORY = 'case $1 in -[pPmi]) echo "$1 $2" >>"$0.memory"; shift 2;; esac\nexec "$@"\n'


def run(script: str, tools: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", script],
        env={"PATH": str(tools), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def calls(tools: Path) -> list[str]:
    return sorted((tools.parent / "calls").read_text().splitlines())


def test_one_worker_gets_its_arguments_and_environment_unchanged(tools: Path) -> None:
    made = plan(
        HOST,
        "--affinity none --env A=it's --env B=$X --env odd.name=1",
        program=python(PRINT_ARGV_AND_ENVIRON, *ODD),
        environ={"KMP_AFFINITY": "compact"},
    )
    done = run(plan_script(made), tools, KMP_AFFINITY="compact", KEPT="yes")
    assert done.returncode == 0, done.stderr
    argv, environ = json.loads(done.stdout)
    assert argv == list(ODD)
    for name, value in made.workers[0].env:
        assert environ.get(name) == value
    assert environ["KEPT"] == "yes"
    assert calls(tools) == ["numactl -C 0-3"]
    assert (tools / "numactl.memory").read_text() == "-i 0-1\n"


def test_each_of_several_workers_has_its_own_binding(tools: Path) -> None:
    made = plan(HOST, "--instances 2", program=python("import os; print(os.environ['OMP_NUM_THREADS'])"))
    done = run(plan_script(made), tools)
    assert (done.returncode, done.stdout) == (0, "2\n2\n")
    assert calls(tools) == ["numactl -C 0-1", "numactl -C 2-3"]


def test_torch_settings_survive_the_shell(tools: Path) -> None:
    code = "import os, sys; sys.stdout.write(os.environ['CPULAUNCH_WORKER'])"
    users = {"LD_PRELOAD": 'it\'s "odd" $HOME \\.so'}
    made = plan(libraries(HOST, "tcmalloc"), "--graph onednn --allocator tcmalloc", program=python(code), environ=users)
    script = plan_script(made).replace("export LD_PRELOAD=", "export NOT_PRELOADED=")
    done = run(script, tools)
    assert done.returncode == 0, done.stderr
    assert done.stdout == dict(made.workers[0].env)["CPULAUNCH_WORKER"]
    settings = decode(done.stdout)
    assert (settings.graph, settings.ld_preload, settings.cpus) == ("onednn", users["LD_PRELOAD"], "0-3")


def test_variables_of_the_script_hide_none_of_the_user(tools: Path) -> None:
    users = {"memory": "16G", "cpus": "all", "status": "s", "pids": "p", "code": "c"}
    code = f"import os; print(all(os.environ[name] == value for name, value in {users}.items()))"
    done = run(plan_script(plan(HOST, "--instances 2", program=python(code))), tools, **users)
    assert done.stdout == "True\nTrue\n"


def test_instance_index_selects_the_workers_to_start(tools: Path) -> None:
    made = plan(HOST, "--instances 2 --instance-index 1", program=python("print('ran')"))
    assert run(plan_script(made), tools).stdout == "ran\n"
    assert calls(tools) == ["numactl -C 2-3"]


def test_without_numactl_taskset_binds(tools: Path) -> None:
    (tools / "numactl").unlink()
    assert run(plan_script(plan(HOST, "--instances 2", program=python("pass"))), tools).returncode == 0
    assert calls(tools) == ["taskset -c 0-1", "taskset -c 2-3"]


def test_without_both_the_program_runs_with_a_message_that_it_is_not_bound(tools: Path) -> None:
    for name in ("numactl", "taskset"):
        (tools / name).unlink()
    done = run(plan_script(plan(HOST, program=python("print('ran')"))), tools)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "not bound" in done.stderr


@pytest.mark.parametrize(("flags", "binds"), [("--binder numactl", 1), ("--binder taskset", 1), ("--binder none", 0)])
def test_the_binder_of_the_plan_is_used_once(tools: Path, flags: str, binds: int) -> None:
    assert run(plan_script(plan(HOST, flags, program=python("pass"))), tools).returncode == 0
    assert (tools.parent / "calls").exists() == bool(binds)
    assert len(calls(tools) if binds else []) == binds


@pytest.mark.parametrize("flags", ["", "--instances 1"])
def test_the_exit_code_of_one_worker(tools: Path, flags: str) -> None:
    assert run(plan_script(plan(HOST, flags, program=python("raise SystemExit(3)"))), tools).returncode == 3


FAIL_IN_ONE = """
import os, signal, sys
if os.environ["OMP_NUM_THREADS"] == "2":
    sys.exit(5)
signal.pause()
"""


def test_a_failing_worker_ends_the_others_and_decides_the_exit_code(tools: Path) -> None:
    uneven = machine(cores=3)
    made = plan(uneven, "--instances 2", program=python(FAIL_IN_ONE))
    assert [worker.threads for worker in made.workers] == [2, 1]
    assert run(plan_script(made), tools).returncode == 5


def test_a_signal_ends_all_workers(tools: Path, tmp_path: Path) -> None:
    ready = "import signal,sys; print('ready', flush=True); signal.pause()"
    script = plan_script(plan(HOST, "--instances 2", program=python(ready)))
    process = subprocess.Popen(["/bin/sh", "-c", script], env={"PATH": str(tools)}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.read() == ""
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_plan_without_a_program_is_an_error() -> None:
    with pytest.raises(UsageError, match="no program"):
        plan_script(plan(HOST, program=None))
