"""No output of any command shows a value that --env gave, unless --show-env asks for it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cpulaunch.cli.corrections.commands import suggestion
from cpulaunch.cli.run import read_command_line, request_for
from cpulaunch.plan.planner import make_plan
from cpulaunch.records.errors import UsageError
from tests import json_output
from tests.plan.machines import machine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shell scripts")

TOKEN = "hf_planted'Token$9"
ENV = ("--env", f"API_KEY={TOKEN}", "--env", "OMP_STACKSIZE=3m")
PROGRAM = "import os\nprint(os.environ['API_KEY'][::-1], os.environ['OMP_STACKSIZE'])\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "show.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("API_KEY", raising=False)
    return "show.py"


def cpulaunch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "cpulaunch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def everything_written(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "show.py"]
    return "".join(path.read_text(errors="replace") for path in files)


COMMANDS = {
    "plan": ["plan"],
    "plan --json": ["plan", "--json"],
    "dry run": ["--dry-run"],
    "sh": ["plan", "--emit", "sh", "--instances", "2"],
    "sh of ranks": ["plan", "--emit", "sh", "--nproc-per-node", "2"],
    "slurm": ["plan", "--emit", "slurm"],
    "k8s": ["plan", "--emit", "k8s"],
    "k8s of ranks": ["plan", "--emit", "k8s", "--nproc-per-node", "2"],
    "verbose": ["--verbose"],
    "report": ["--report", "report.json", "--verbose", "--log-dir", "logs"],
    "report on stdout": ["--report", "-", "--instances", "2", "--oversubscribe"],
    "ranks": ["--report", "report.json", "--verbose", "--nproc-per-node", "2", "--log-dir", "logs", "-t", "3"],
    "torchrun": ["torchrun", "--nproc-per-node", "2"],
    "strict": ["--strict", "--allocator", "mimalloc"],
    "another option that fails": ["--no-such-option"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_no_output_has_the_value(words: list[str], script: str, tmp_path: Path) -> None:
    done = (
        cpulaunch(*words[:1], *ENV, *words[1:], script)
        if words[0] in ("plan", "torchrun")
        else cpulaunch(*ENV, *words, script)
    )
    assert "Traceback" not in done.stderr
    for text in (done.stdout, done.stderr, everything_written(tmp_path)):
        assert "planted" not in text.lower()


@pytest.mark.parametrize("text", [TOKEN, f"={TOKEN}", f"API_KEY:{TOKEN}"])
def test_an_assignment_in_a_wrong_form_is_not_quoted(text: str, script: str) -> None:
    done = cpulaunch("plan", "--env", text, script)
    assert done.returncode == 2
    assert "planted" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *(("--nproc-per-node 2", name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")),
        *(("", name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CPULAUNCH_WORKER")),
        ("--instances 2", "CPULAUNCH_INSTANCE"),
    ],
)
def test_an_error_about_a_variable_does_not_repeat_its_value(options: str, name: str) -> None:
    host = machine()
    line = read_command_line([*options.split(), "--env", f"{name}={TOKEN}", "a.py"], {})
    with pytest.raises(UsageError) as caught:
        make_plan(host, request_for(line, host, {}))
    assert name in str(caught.value)
    assert "--env" in str(caught.value)
    assert "planted" not in str(caught.value)


def test_a_suggestion_does_not_repeat_the_value() -> None:
    before = ["--instances", "2", "--env", f"K={TOKEN}", f"--env=L={TOKEN}"]
    assert suggestion("paln", before, ["a.py"]) == (
        "did you mean cpulaunch plan --instances 2 --env K=... --env=L=... a.py?"
    )
    assert suggestion("doctr", before, []) == "did you mean cpulaunch doctor?"


@pytest.mark.parametrize("words", [["-x", f"API_KEY={TOKEN}"], ["-e", f"K={TOKEN}"], ["-genv", "API_KEY", TOKEN]])
def test_the_answer_to_another_launchers_option_does_not_repeat_the_value(words: list[str], script: str) -> None:
    done = cpulaunch(*words, script)
    assert done.returncode == 2
    assert "--env NAME=VALUE" in done.stderr
    assert "planted" not in done.stderr


def test_the_worker_gets_the_value_and_show_env_shows_it(script: str, tmp_path: Path) -> None:
    done = cpulaunch(*ENV, "--show-env", "--report", "report.json", script)
    assert done.stdout == f"{TOKEN[::-1]} 3m\n"
    report = json_output.read("report", (tmp_path / "report.json").read_text())
    assert report["plan"]["workers"][0]["env"]["API_KEY"] == TOKEN


def test_a_variable_that_tunes_is_shown(script: str) -> None:
    plan = json_output.read("plan", cpulaunch("plan", "--json", *ENV, script).stdout)
    env = plan["workers"][0]["env"]
    assert (env["API_KEY"], env["OMP_STACKSIZE"]) == ("(hidden)", "3m")
    note = next(note for note in plan["notes"] if note["setting"] == "API_KEY")
    assert note["value"] == "(hidden)"
    assert "--show-env" in note["reason"]


def test_a_report_is_for_its_owner_only(script: str, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        assert cpulaunch(*ENV, "--report", "report.json", script).returncode == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("count", ["--instances", "--nproc-per-node"])
def test_an_emitted_script_takes_the_value_from_its_caller(script: str, count: str) -> None:
    text = cpulaunch("plan", "--emit", "sh", count, "1", *ENV, script).stdout
    assert "planted" not in text
    without = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert without.returncode != 0
    assert "API_KEY: set it before you start this script" in without.stderr
    environ = {**os.environ, "API_KEY": TOKEN}
    done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert done.stdout == f"{TOKEN[::-1]} 3m\n", done.stderr


def test_a_name_that_a_shell_does_not_pass_on_is_an_error(script: str) -> None:
    words = ["plan", "--emit", "sh", "--env", "odd.name=planted"]
    done = cpulaunch(*words, script)
    assert done.returncode == 2
    assert "--show-env" in done.stderr
    assert "planted" not in done.stderr
    assert "odd.name=planted" in cpulaunch(*words, "--show-env", script).stdout


def test_a_batch_script_takes_the_value_from_the_environment_of_sbatch(script: str) -> None:
    text = cpulaunch("plan", "--emit", "slurm", *ENV, script).stdout
    assert ': "${API_KEY?' in text
    assert "--env OMP_STACKSIZE=3m" in text
    assert text.index("API_KEY") < text.index("srun")


def test_a_manifest_takes_the_value_from_a_secret(script: str) -> None:
    text = cpulaunch("plan", "--emit", "k8s", *ENV, script).stdout
    container = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"][0]
    secret = {"secretKeyRef": {"name": "show-env", "key": "API_KEY"}}
    assert container["env"] == [{"name": "API_KEY", "valueFrom": secret}]
    assert 'kubectl create secret generic show-env --from-literal=API_KEY="$API_KEY"' in text
