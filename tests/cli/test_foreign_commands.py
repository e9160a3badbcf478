"""`cpulaunch run_cpu` and `cpulaunch ipexrun`: command lines of the tools' documentation, one word replaced."""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.cli.run import read_command_line, request_for
from cpulaunch.cli.translate import QUIET, run_foreign
from cpulaunch.plan.planner import make_plan
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from tests.plan.machines import machine

HOST = machine(sockets=2, cores=28, smt=2)

DOCUMENTED = {
    # Source: torch 2.13, torch/backends/xeon/run_cpu.py.
    "run_cpu --throughput-mode script.py args": ["0-27", "28-55"],
    "run_cpu --node-id 1 script.py args": ["28-55"],
    "run_cpu -- python_script args": ["0-55"],
    "run_cpu --ninstances 14 --ncores-per-instance 4 python_script args": [f"{n}-{n + 3}" for n in range(0, 56, 4)],
    "run_cpu --ninstances 2 --rank 0 python_script args": ["0-27"],
    "run_cpu --ninstances 2 --rank 1 python_script args": ["28-55"],
    'run_cpu --core-list "0, 1, 2, 3" --ninstances 2 --ncores-per-instance 2 --rank 0 python_script args': ["0-1"],
    # Source: intel_extension_for_pytorch 2.8, cpu/launch/launch.py and launcher.py.
    "ipexrun --throughput-mode script.py args": ["0-27", "28-55"],
    "ipexrun --nodes-list 1 script.py args": ["28-55"],
    "ipexrun python_script args": ["0-55"],
    "ipexrun  --ninstances 14 --ncores-per-instance 4 python_script args": [f"{n}-{n + 3}" for n in range(0, 56, 4)],
    "ipexrun  --ninstances 2 --instance-idx 0 python_script args": ["0-27"],
    "ipexrun  --ninstances 2 --instance-idx 1 python_script args": ["28-55"],
    'ipexrun  --cores-list "0-3" --ninstances 2 --ncores-per-instance 2 --instance-idx 0 python_script args': ["0-1"],
    "ipexrun --nnodes 1 python_script --arg1 --arg2": ["0-27", "28-55"],
    "ipexrun --nnodes 1 --nprocs-per-node 2 python_script": ["0-27", "28-55"],
    "ipexrun cpu python_script args": ["0-55"],
    "ipexrun cpu --ninstances 7 --ncore_per_instance 8 python_script args": [f"{n}-{n + 7}" for n in range(0, 56, 8)],
    "ipexrun cpu --distributed --nproc_per_node=2 python_script": ["0-27", "28-55"],
}


def translated(words: str) -> list[str]:
    """The command line that `cpulaunch` and these words run."""
    tool, *arguments = shlex.split(words)
    found: list[str] = []
    assert run_foreign(tool, [QUIET, *arguments], {}, launch=lambda line, _: found.extend(line) or 0) == 0
    return found


@pytest.mark.parametrize(("words", "cpus"), DOCUMENTED.items())
def test_documented_command_lines_mean_the_same_cores(words: str, cpus: list[str]) -> None:
    line = read_command_line(translated(words)[1:], {})
    made = make_plan(HOST, request_for(line, HOST, {}))
    assert [format_cpulist(worker.cpus) for worker in made.workers] == cpus
    assert line.program is not None
    assert [line.program.target, *line.program.args] == shlex.split(words)[-1 - len(line.program.args) :]


@pytest.mark.torch
def test_every_command_line_of_run_cpus_documentation_is_in_the_table() -> None:
    """Those that this version of torch documents, its line breaks joined."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    text = (Path(spec.origin).parent / "backends/xeon/run_cpu.py").read_text().split('"""')[1]
    start = "python -m torch.backends.xeon.run_cpu "
    blocks = [block.replace("\n", " ").split() for block in text.split("\n\n") if block.strip().startswith(start)]
    documented = {shlex.join(shlex.split(" ".join(words[2:]))) for words in blocks} - {
        "torch.backends.xeon.run_cpu --help"
    }
    known = {shlex.join(shlex.split(f"torch.backends.xeon.{words}")) for words in DOCUMENTED if words[0] == "r"}
    assert documented
    assert documented <= known


SCRIPT = """
import os, sys
print(sys.argv[1:], len(os.sched_getaffinity(0)))
sys.exit(int(os.environ.get("INDEX", 0)) * 3)
"""
TWO_CORES = [
    ("run_cpu --node-id 0 script.py args", 3, 3),
    ("run_cpu --ninstances 2 --ncores-per-instance 1 python_script args", 1, 3),
    ('run_cpu --core-list "0, 1" --ninstances 2 --ncores-per-instance 1 --rank 0 python_script args', 1, 3),
    ("ipexrun --ninstances 2 --ncores-per-instance 1 python_script args", 0, 0),
    ("ipexrun --log-dir logs python_script args", 1, 3),
    ("ipexrun cpu --distributed --nproc_per_node=2 script.py args", 1, 3),
]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or not {0, 1} <= os.sched_getaffinity(0), reason="needs CPUs 0 and 1"
)
@pytest.mark.parametrize(("words", "index", "code"), TWO_CORES)
def test_documented_command_lines_run_and_end_as_their_program(
    words: str, index: int, code: int, tmp_path: Path
) -> None:
    for name in ("script.py", "python_script"):
        (tmp_path / name).write_text(SCRIPT)
    tool, *arguments = shlex.split(words)
    environ = os.environ | {"INDEX": str(min(index, 1))}
    command = [sys.executable, "-m", "cpulaunch", tool, *arguments]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == code, ran.stderr
    assert "['args']" in ran.stdout + ran.stderr
    assert f"cpulaunch: {tool}'s options are in cpulaunch: cpulaunch " in ran.stderr


def test_the_equivalent_is_said_once_without_secrets(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ninstances", "2", "--env", "TOKEN=geheim", "a.py", "--env", "kept"]
    lines: list[list[str]] = []
    for quiet in ([], [QUIET]):
        run_foreign("ipexrun", [*quiet, *arguments], {}, launch=lambda line, _: lines.append(list(line)) or 0)
    said = capfd.readouterr().err
    assert said == (
        "cpulaunch: ipexrun's options are in cpulaunch: cpulaunch --instances 2 --env TOKEN=... a.py --env kept\n"
    )
    assert lines[0] == lines[1] == ["run", "--instances", "2", "--env", "TOKEN=geheim", *arguments[4:]]


def test_an_argument_of_the_program_is_not_the_option() -> None:
    assert translated(f"run_cpu a.py {QUIET}") == ["run", "a.py", QUIET]


def test_an_option_without_counterpart_is_an_error() -> None:
    with pytest.raises(UsageError, match="ipexrun option without counterpart"):
        run_foreign("ipexrun", ["--nosuch", "a.py"], {}, launch=lambda line, _: 0)
