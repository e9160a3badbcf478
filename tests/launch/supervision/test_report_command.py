"""--report, --metric and --start-barrier as a user meets them: files, lines, exit codes."""

import errno
import json
import os
import stat
import subprocess
import sys

import pytest

from cpulaunch.records.errors import CpulaunchError
from cpulaunch.system.files import outputs
from cpulaunch.system.files.outputs import REPORT, check_path, save_output
from tests import json_output


@pytest.fixture
def cpulaunch(tmp_path):
    """Run the command in a folder with a program that prints and tells a figure."""
    (tmp_path / "job.py").write_text(
        "import cpulaunch, sys\ncpulaunch.ready()\nprint('speed: 18.5')\ncpulaunch.metric('tokens/s', 1.5)\n"
        "sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)\n"
    )

    def run(*arguments, prefix=(), **options):
        argv = [*prefix, sys.executable, "-m", "cpulaunch", *arguments]
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
        result = subprocess.run(
            argv, env=environ, cwd=tmp_path, **{"capture_output": True, "text": True, "timeout": 120} | options
        )
        assert not list(tmp_path.glob("cpulaunch-*")), "the run's directory is gone"
        return result

    return run


TWO = ("--cpus", "0", "--oversubscribe", "--instances", "2")


def test_a_launch_with_everything(cpulaunch, tmp_path):
    result = cpulaunch("--report", "r.json", "--metric", r"speed: (\S+)", "--start-barrier", *TWO, "job.py")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] speed: 18.5", "[1] speed: 18.5"]
    assert result.stderr.splitlines()[-3:] == [
        "cpulaunch: speed: 37 (18.5 + 18.5)",
        "cpulaunch: tokens/s: 3 (1.5 + 1.5)",
        "cpulaunch: report: r.json",
    ]
    report = json_output.read("report", (tmp_path / "r.json").read_text())
    assert report["metrics"]["speed"] == {"sum": 37.0, "values": [18.5, 18.5]}
    assert [worker["index"] for worker in report["plan"]["workers"]] == [0, 1]
    assert [worker["plugin"] for worker in report["workers"]] == ["not loaded"] * 2
    assert os.stat(tmp_path / "r.json").st_mode & 0o777 == 0o600


LINE = "speed: 18.5"
ON_STDOUT = [
    (["job.py"], 0, [LINE]),
    (["job.py", "3"], 3, [LINE, "cpulaunch: worker 0"]),
    ([*TWO, "job.py"], 0, [f"[0] {LINE}", f"[1] {LINE}"]),
    ([*TWO, "--show", "1", "--log-dir", "logs", "job.py"], 0, [LINE]),
    ([*TWO, "--show", "none", "--metric", r"speed: (.*)", "job.py"], 0, ["cpulaunch: speed: 37"]),
    (["--cpus", "0", "--oversubscribe", "--nproc-per-node", "2", "job.py"], 0, [LINE]),
]


@pytest.mark.parametrize(("words", "code", "said"), ON_STDOUT, ids=lambda each: None)
def test_a_report_has_stdout_for_itself(cpulaunch, tmp_path, words, code, said):
    result = cpulaunch("--report", "-", *words)
    assert json_output.read("report", result.stdout)["exit_code"] == result.returncode == code
    for text in said:
        assert any(line.startswith(text) for line in result.stderr.splitlines()), result.stderr
    if "--log-dir" in words:
        assert (tmp_path / "logs/worker-0.log").read_text() == f"{LINE}\n"


def test_no_report_of_what_could_not_start(cpulaunch):
    result = cpulaunch("--report", "-", "--no-python", "nosuch")
    assert (result.returncode, result.stdout) == (127, "")


def test_the_plan_says_where_the_output_goes(cpulaunch):
    plan = json_output.read("plan", cpulaunch("--json", "--report", "-", "job.py").stdout)
    (note,) = [note for note in plan["notes"] if note["setting"] == "report"]
    assert "what workers write to stdout goes to stderr" in note["reason"]


def test_a_failure_is_reported_and_keeps_its_exit_code(cpulaunch, tmp_path):
    assert cpulaunch("--report", "r.json", "job.py", "3").returncode == 3
    report = json_output.read("report", (tmp_path / "r.json").read_text())
    assert (report["exit_code"], report["workers"][0]["exit_code"]) == (3, 3)


def test_figures_of_programs_cost_nothing_without_a_listener(cpulaunch):
    result = cpulaunch("job.py")
    assert (result.stdout, result.stderr) == ("speed: 18.5\n", "")


FILL = """
import os
folder = os.path.dirname(os.environ["CPULAUNCH_EVENTS"])
with open(folder + "/full", "wb", buffering=0) as file:
    while True:
        try:
            file.write(bytes(1 << 12))
        except OSError:
            break
import torch
"""


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_worker_whose_events_found_no_space_is_not_one_without_torch(cpulaunch, tmp_path):
    (tmp_path / "fill.py").write_text(FILL)
    small = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=64k tmpfs {tmp_path}/small && exec "$@"', "sh")
    (tmp_path / "small").mkdir()
    options = ("--strict", "--precision", "tf32", "--report", "r.json")
    result = cpulaunch(*options, "fill.py", prefix=(*small, "env", f"TMPDIR={tmp_path}/small"))
    assert result.returncode == 0, result.stderr
    assert "warning: worker 0 could not write all events: is the file system of TMPDIR full?" in result.stderr


ABSENT = "without effect: --precision: no worker loaded torch 2.5 or newer with cpulaunch in its environment"


def test_settings_without_a_plugin_are_a_warning(cpulaunch):
    result = cpulaunch("--report", "r.json", "--precision", "bf16", "--no-python", sys.executable, "job.py")
    assert result.returncode == 0
    assert f"cpulaunch: warning: {ABSENT}\n" in result.stderr


def test_settings_without_a_plugin_fail_a_strict_run(cpulaunch, tmp_path):
    result = cpulaunch("--strict", "--report", "r.json", "--precision", "tf32", "job.py")
    assert result.returncode == 125
    assert f"cpulaunch: error: {ABSENT} (--strict)" in result.stderr
    assert json_output.read("report", (tmp_path / "r.json").read_text())["exit_code"] == 125


def test_a_strict_run_notices_the_absence_without_a_report(cpulaunch):
    result = cpulaunch("--strict", "--precision", "tf32", "--no-python", sys.executable, "job.py")
    assert result.returncode == 125
    assert f"cpulaunch: error: {ABSENT} (--strict)" in result.stderr


@pytest.mark.parametrize(
    ("path", "reason"),
    [("no/r.json", "there is no directory"), (".", "it is a directory"), ("job.py/r.json", "there is no directory")],
)
def test_a_report_that_cannot_be_written_starts_nothing(cpulaunch, tmp_path, path, reason):
    (tmp_path / "job.py").write_text("open('started', 'w')")
    result = cpulaunch("--report", path, "job.py")
    assert result.returncode == 125
    lines = result.stderr.splitlines()
    assert lines[-2].startswith(f"cpulaunch: error: the report cannot be written: {path} ({reason}")
    assert lines[-1].startswith("hint: --report needs")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(("status", "code"), [("0", 125), ("3", 3)])
def test_a_report_lost_at_the_end_is_a_failure(cpulaunch, tmp_path, status, code):
    result = cpulaunch("--report", "/dev/full", "job.py", status)
    assert result.returncode == code
    assert "cpulaunch: error: the report cannot be written: /dev/full (No space left on device)" in result.stderr


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_known_at_the_start(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(CpulaunchError, match="no permission"):
        check_path(REPORT, str(tmp_path / "r.json"))


def test_a_report_replaces_the_last_one_whole_through_a_link(tmp_path):
    (tmp_path / "real.json").write_text("x" * 10_000)
    (tmp_path / "link.json").symlink_to("real.json")
    assert save_output(REPORT, str(tmp_path / "link.json"), '{"a": "ä"}') is None
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": "ä"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_what_is_no_folder_is_an_error_without_effect(tmp_path):
    (tmp_path / "r.json").write_text("before")
    error = save_output(REPORT, str(tmp_path / "r.json" / "below"), "after")
    assert "the report cannot be written" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert (tmp_path / "r.json").read_text() == "before"


@pytest.mark.parametrize(
    ("number", "through_link", "writes"),
    [(errno.ENOSPC, False, 1), (errno.ENOSPC, True, 2), (errno.EBUSY, False, 2), (errno.ELOOP, False, 2)],
)
def test_a_report_is_also_tried_beside_its_name_where_that_can_help(
    tmp_path, monkeypatch, number, through_link, writes
):
    """Not on the same full disk; a mount, or a link to itself, is in the way of the name alone."""
    written = []

    def write(path, data, **_):
        written.append(path)
        if len(written) == 1:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(outputs, "write_output", write)
    (tmp_path / "full").mkdir()
    path = tmp_path / "r.json"
    if through_link:
        path.symlink_to("full/r.json")
    error = str(save_output(REPORT, str(path), "content", direct=None))
    assert (len(written), os.strerror(number) in error, "it is in" in error) == (writes, True, writes == 2)


def test_a_named_pipe_gets_the_report(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_path(REPORT, str(tmp_path / "pipe"))
    reader = subprocess.Popen(["/bin/cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE)
    assert save_output(REPORT, str(tmp_path / "pipe"), '{"a": 1}') is None
    assert json.loads(reader.communicate(timeout=60)[0]) == {"a": 1}


@pytest.mark.parametrize(
    "code", ["os.unlink('pipe'); os.mkfifo('pipe')", "os.mkfifo('new'); os.replace('new', 'pipe')"]
)
def test_a_pipe_in_place_of_the_one_that_was_there_before_is_replaced(cpulaunch, tmp_path, code):
    """Else the launch would wait for a reader, for ever. A new one gets the number of a removed one."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "job.py").write_text(f"import os; {code}\n")
    assert cpulaunch("--report", "pipe", "job.py", timeout=60).returncode == 0
    assert json_output.read("report", (tmp_path / "pipe").read_text())["exit_code"] == 0


@pytest.mark.parametrize("place", ["pipe", "/dev/null"])
def test_a_report_takes_the_place_of_no_closed_descriptor(cpulaunch, tmp_path, place):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "job.py").write_text("import sys; print('x' * 100000); sys.exit(4 if sys.stdin.read() else 0)\n")

    reader = subprocess.Popen(["/bin/cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True)
    try:
        result = cpulaunch("--report", place, *TWO, "job.py", prefix=["/bin/sh", "-c", 'exec "$@" <&- >&-', "sh"])
        assert result.returncode == 0, result.stderr
        if place == "pipe":
            assert json_output.read("report", reader.communicate(timeout=60)[0])["exit_code"] == 0
    finally:
        reader.kill()
        reader.communicate()


def test_a_page_may_be_named_as_standard_output_is(cpulaunch, tmp_path):
    assert cpulaunch("--report", "-", "--html", "-", "job.py").returncode == 0
    assert (tmp_path / "-").read_text().startswith("<!doctype html>")


def test_a_device_is_known_by_its_number(tmp_path):
    try:
        os.mknod(tmp_path / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        os.close(os.open(tmp_path / "null", os.O_WRONLY))
    except PermissionError:
        pytest.skip("not allowed to make or open a device here")
    before = check_path(REPORT, str(tmp_path / "null"))
    os.mknod(tmp_path / "new", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    os.replace(tmp_path / "new", tmp_path / "null")
    assert save_output(REPORT, str(tmp_path / "null"), "{}", direct=before) is None
    assert (tmp_path / "null").is_char_device()


@pytest.mark.torch
def test_a_worker_that_loads_torch_says_what_took_effect(cpulaunch, tmp_path):
    (tmp_path / "job.py").write_text("import torch\nprint(torch.ones(3).sum())\n")
    result = cpulaunch("--report", "r.json", "--cpus", "0", "--flush-denormal", "--openmp", "default", "job.py")
    assert result.returncode == 0
    (worker,) = json_output.read("report", (tmp_path / "r.json").read_text())["workers"]
    assert worker["plugin"] == "loaded"
    assert worker["settings"]["flush_denormal"]["state"] == "applied"
    assert {group["cpus"] for group in worker["binding"]["threads"]} == {"0"}
    assert worker["binding"]["as_planned"] is True
    (runtime,) = worker["binding"]["openmp"]
    assert (worker["binding"]["openmp_runtime"], worker["binding"]["openmp_path"]) == ("gnu", runtime)
    assert f"cpulaunch: OpenMP runtime: {runtime}\n" in result.stderr
    assert worker["peak_memory_bytes"] >= worker["binding"]["rss_bytes"] > 50 << 20


FORWARD = """
import os, pathlib, time, torch

def waits(pid):
    names = os.listdir(f"/proc/{pid}/fd")
    return any(os.path.realpath(f"/proc/{pid}/fd/{name}").endswith("/gate") for name in names)

if os.environ["CPULAUNCH_EVENTS"].endswith("worker-0.jsonl"):
    pathlib.Path("pid.new").write_text(str(os.getpid()))
    os.rename("pid.new", "pid")
else:
    while not os.path.exists("pid"):
        time.sleep(0.01)
    while not waits(pathlib.Path("pid").read_text()):
        time.sleep(0.01)
    pathlib.Path("late").write_text("")
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2))
print(os.path.exists("late"))
"""


@pytest.mark.torch
def test_the_first_forward_waits_for_all_workers(cpulaunch, tmp_path):
    (tmp_path / "job.py").write_text(FORWARD)
    result = cpulaunch("--start-barrier", *TWO, "job.py")
    assert sorted(result.stdout.splitlines()) == ["[0] True", "[1] True"], result.stderr
