"""The command tune: its command line, real searches over programs that end at once, and what ends one."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")

from cpulaunch.cli.arguments import canonical, value_count
from cpulaunch.cli.measuring import tune_arguments, tune_outcome
from cpulaunch.measure.samples import MetricChoice
from cpulaunch.measure.tuning.outcome.tuned_profile import profile_text
from cpulaunch.records.errors import UsageError
from tests import json_output
from tests.forked import run_forked
from tests.launch.launching import alive, eventually

THREADS = """
    import os, cpulaunch
    cpulaunch.metric("items/s", 100.0 / int(os.environ.get("OMP_NUM_THREADS", "2")))
"""
"""A program for which fewer threads are better."""
SLOWED = THREADS.replace("100.0 / int", "float")
"""A program for which fewer threads are worse: no trial comes to the final round, which has most of the launches."""


NO_TIME = ("--minutes", "0.001")
"""For a search of which the first launches are enough: none follows them."""
SLOW_IMPORTS = ("cpulaunch.measure.tuning.study", "optuna.storages._rdb.storage")
"""What takes a search longer to import than a launch takes."""


def parse(*words):
    return tune_arguments.parse_tune(words, lambda name: value_count(canonical(name)))


def test_own_options_stand_among_those_of_a_launch():
    line = parse(
        "--trials", "5", "--graph", "onednn", "--env=A=b", "--minutes=0.5", "--smt", "infer.py", "--trials", "x"
    )
    assert line.options == ("--graph", "onednn", "--env=A=b", "--smt")
    assert line.program == ("infer.py", "--trials", "x")
    assert (line.limits.trials, line.limits.seconds) == (5, 30)


def test_modules_and_commands_are_programs_too():
    assert parse("-m", "--cpus", "0", "package", "-m").program == ("-m", "package", "-m")
    assert parse("--no-python", "--", "./serve", "--json").program == ("--no-python", "./serve", "--json")


def test_what_varies_and_what_counts():
    line = parse("--vary", "threads=1,2", "--vary=allocator", "--fix", "smt,affinity", "--metric", "loss", "a.py")
    assert line.vary == {"threads": (1, 2), "allocator": ()}
    assert line.fixed == {"smt", "affinity"}
    assert line.goal.choice == MetricChoice(name="loss", lower_is_better=True)
    assert parse("--wall-time", "a.py").goal.choice == MetricChoice()
    chosen = parse("--latency", "--metric", "latency p99 (ms)", "a.py").goal
    assert (chosen.choice, chosen.latency) == (MetricChoice(name="latency p99 (ms)"), True)
    assert parse("--max-error", "0.01", "a.py").goal.max_error == 0.01


WRONG = {
    "": "no script given",
    "--trials 5": "no script given",
    "--trials 0 a.py": "invalid value '0' for --trials",
    "--minutes nan a.py": "invalid value",
    "--max-error 2 a.py": "invalid value",
    "--timeout -1 a.py": "invalid value",
    "--save a/../b a.py --save": None,
    "--save none a.py": "invalid value",
    "--vary nonsense a.py": "unknown setting",
    "--vary": "--vary needs a value",
    "--fresh=1 a.py": "--fresh takes no value",
    "--module=json.tool a.py": "--module takes no value",
    "-m=json.tool a.py": "-m takes no value",
    "--metric x --wall-time a.py": "exclude each other",
    "--rate 5 --dist a.py": "--dist and --rate exclude each other",
    "--rate 5 --wall-time a.py": "--rate and --wall-time exclude each other",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_command_line_is_a_usage_error(words):
    if WRONG[words] is None:
        assert parse(*words.split()).program == ("a.py", "--save")
        return
    with pytest.raises(UsageError) as error:
        parse(*words.split())
    assert WRONG[words] in str(error.value)


@pytest.fixture
def home(tmp_path):
    """The environment of a user without earlier searches."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("XDG_", "OMP_", "PYTHON"))}
    (tmp_path / "tmp").mkdir()
    return {**environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}


@pytest.fixture
def tune(tmp_path, home):
    """A function that runs `cpulaunch tune` on a program's text."""

    def run(*words, code=THREADS, program=("program.py",), **variables):
        (tmp_path / "program.py").write_text(textwrap.dedent(code))
        arguments = ["-m", "cpulaunch", "tune", *words, *program]
        return run_forked(arguments, {**home, **variables}, modules=SLOW_IMPORTS, folder=tmp_path, seconds=240)

    return run


@pytest.fixture
def memory_cgroup():
    """A cgroup whose processes have 500 MB of memory, and no swap."""
    if os.geteuid():
        pytest.skip("needs root")
    own = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    controllers = {part: path for names, path in own.items() for part in names.split(",")}
    root = Path("/sys/fs/cgroup")
    if "memory" in controllers:
        parent, limit = root / "memory" / controllers["memory"].lstrip("/"), "memory.limit_in_bytes"
    else:
        parent, limit = root, "memory.max"
    folder = parent / f"cpulaunch-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(500 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")
    yield folder
    eventually(lambda: not (folder / "cgroup.procs").read_text(), "the end of its processes")
    folder.rmdir()


def read(ran):
    return json_output.read("tune", ran.stdout)


def test_a_search_ends_with_a_profile_that_a_launch_takes(tune, tmp_path, home):
    ran = tune("--json", "--vary", "threads=1,2", "--trials", "3")
    data = read(ran)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert data["winner"]["settings"] == {"threads": "1"}
    assert (data["winner"]["ratio"], data["winner"]["confirmed"]) == (2, True)
    assert data["winner"]["command"] == ["cpulaunch", "--profile", "program-tuned", "program.py"]
    assert {"name": "OMP_NUM_THREADS", "default": "2", "winner": "1"} in data["winner"]["environment"]
    command = [sys.executable, "-m", *data["winner"]["command"]]
    command[3:3] = ["--report", "report.json"]
    subprocess.run(command, cwd=tmp_path, env=home, check=True, timeout=60)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["metrics"]["items/s"]["sum"] == 100
    assert report["plan"]["warnings"] == []


@pytest.mark.slow
def test_text_for_people_and_what_a_second_search_does(tune):
    first = tune("--vary", "threads=1,2", "--trials", "1")
    assert (first.returncode, first.stderr) == (0, "")
    assert "--threads 1 is 2.00 times as fast as the default" in first.stdout
    assert "cpulaunch --profile program-tuned program.py" in first.stdout
    assert "outputs were not compared" in first.stdout
    short = ("--json", "--vary", "threads=1,2", "--trials", "1", *NO_TIME)
    again = read(tune(*short))
    assert len(again["trials"]) == 1
    assert len(again["baseline"]) >= 4, "the default is measured again, the trial is not"
    assert len(read(tune(*short, "--fresh"))["baseline"]) in (2, 3), "the third is of a disturbed start"


def test_a_pipe_that_the_program_puts_in_place_of_the_profile_is_replaced(tune, tmp_path):
    """Else the search would wait for a reader, for ever."""
    code = "import os\nos.path.exists('here.toml') or os.mkfifo('here.toml')\n" + textwrap.dedent(THREADS)
    read(tune("--json", "--vary", "threads=1,2", "--trials", "1", "--save", "here.toml", code=code))
    assert (tmp_path / "here.toml").is_file()


def test_a_profile_in_a_removed_folder_is_given_by_its_name(home, tmp_path):
    """The program removes the current folder, in which the profile is saved."""
    folder, script = tmp_path / "folder", tmp_path / "program.py"
    folder.mkdir()
    script.write_text(
        f"import os\nos.path.isdir({str(folder)!r}) and os.rmdir({str(folder)!r})\n{textwrap.dedent(THREADS)}"
    )
    words = ("--json", "--vary", "threads=1,2", "--trials", "1", "--save", "x.toml", str(script))
    command = [sys.executable, "-m", "cpulaunch", "tune", *words]
    data = read(subprocess.run(command, cwd=folder, env=home, capture_output=True, text=True, timeout=240, check=False))
    assert data["winner"]["command"] == ["cpulaunch", "--profile", "x.toml", str(script)]


def test_a_pipe_that_was_there_before_gets_the_profile(tune, tmp_path):
    os.mkfifo(tmp_path / "here.toml")
    reader = subprocess.Popen(["cat", "here.toml"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    read(tune("--json", "--vary", "threads=1,2", "--trials", "1", "--save", "here.toml"))
    assert "found by cpulaunch tune for program.py" in reader.communicate(timeout=60)[0]


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("./program.py", "program.py"),
        ("mine.toml", "mine.toml"),
        ("mine", "home/.config/cpulaunch/profiles/mine.toml"),
    ],
)
def test_a_file_that_no_search_has_written_is_not_replaced(tune, tmp_path, words, file):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    text = 'kind = "intent"\nsummary = "mine"\n' if file.endswith(".toml") else "open('launched', 'w')"
    path.write_text(text)
    ran = tune("--vary", "threads=1,2", "--save", words, code="open('launched', 'w')")
    assert (ran.returncode, "--save names a file that no search has written" in ran.stderr) == (2, True)
    assert (path.read_text(), (tmp_path / "launched").exists()) == (text, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [("folder/", "names a directory"), ("program.py/mine.toml", "names a file that cannot be written")],
)
def test_a_profile_that_cannot_be_written_is_found_out_before_the_search(tune, tmp_path, words, said):
    (tmp_path / "folder").mkdir()
    ran = tune("--vary", "threads=1,2", "--save", words, code="open('launched', 'w')")
    assert (ran.returncode, said in ran.stderr, (tmp_path / "launched").exists()) == (2, True, False)


def test_what_a_search_has_saved_at_a_path_is_replaced_by_the_next_one(tune, tmp_path):
    for _ in range(2):
        data = read(tune("--json", "--vary", "threads=1,2", "--trials", "1", "--save", "here.toml"))
        assert data["winner"]["profile"] == str(tmp_path / "here.toml")
        assert data["winner"]["command"] == ["cpulaunch", "--profile", "here.toml", "program.py"]


def test_instances_are_no_part_of_a_profile(tune):
    words = ("--throughput", "--vary", "instances=2", "--oversubscribe", "--trials", "1")
    data = read(tune("--json", *words, code="import cpulaunch; cpulaunch.metric('items/s', 5)"))
    assert (data["winner"]["ratio"], data["winner"]["profile"]) == (2, None)
    assert data["winner"]["command"] == ["cpulaunch", "--oversubscribe", "--instances", "2", "program.py"]


@pytest.mark.slow
def test_fixed_options_are_those_of_every_launch_and_secrets_stay_hidden(tune):
    code = """
        import os, sys, cpulaunch
        if os.environ.get("CPULAUNCH_WORKER") and os.environ.get("KEY") != "secret":
            sys.exit("no key")
        cpulaunch.metric("items/s", 100.0 / int(os.environ.get("OMP_NUM_THREADS", "2")))
    """
    data = read(tune("--json", "--env", "KEY=secret", "--vary", "threads=1", "--trials", "1", code=code))
    assert data["options"] == ["--env", "KEY=..."]
    assert data["winner"]["confirmed"], "launches of the final round have them too"
    assert "secret" not in json.dumps(data)


@pytest.mark.parametrize("wanted", ["x.toml", "./x.toml"])
def test_a_profile_is_saved_where_the_search_began(tmp_path, monkeypatch, wanted):
    folder = tmp_path / "removed by the program"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert tune_outcome._saved_path(wanted, None, str(folder)) == str(folder / "x.toml")


def test_nothing_is_claimed_where_nothing_is_found(tune):
    """A trial that is so little slower comes to the final round, which ends once that is clear."""
    code = "import os, cpulaunch; cpulaunch.metric('x/s', 0.99 if os.environ.get('OMP_NUM_THREADS') == '1' else 1)"
    ran = tune("--json", "--vary", "threads=1", "--trials", "1", code=code)
    data = read(ran)
    assert (ran.returncode, data["winner"]) == (0, None)
    assert [each["ratio"] for each in data["final"]["finalists"]] == [0.99]
    assert data["verdict"] == "nothing was found that this machine can show to be better than the default"


SERVER = """
    import os, time, cpulaunch
    seconds = [0.0]
    time.perf_counter, time.sleep = lambda: sum(seconds), seconds.append
    for number in cpulaunch.requests(5, 20, warm_up=2):
        time.sleep(0.002 if os.environ.get("OMP_NUM_THREADS") == "1" else 0.02)
"""
"""Requests by a clock of the program's own: other load of the machine takes none of its time."""


@pytest.mark.slow
def test_latencies_under_an_open_loop_load(tune):
    data = read(tune("--json", "--latency", "--rate", "40", "--vary", "threads=1", code=SERVER))
    assert (data["latency"], data["metric"]["name"]) == ({"rate": 40}, "latency p95 (ms)")
    assert data["winner"]["settings"] == {"threads": "1"}
    assert {"latency p50 (ms)", "latency p99 (ms)", "requests/s"} <= data["trials"][0]["metrics"].keys()
    assert data["baseline"][0]["metrics"]["requests/s"] > 20, "five of the program, without --rate"
    refused = tune("--latency", "--vary", "threads=1", code="print(1)")
    assert (refused.returncode, "cpulaunch.requests(20, 500)" in refused.stderr) == (125, True)


@pytest.mark.parametrize(("alone", "other", "said"), [(0.1, 0.005, "its queue grows"), (0.005, 0.1, None)])
def test_latencies_that_depend_on_the_length_of_a_run_neither_win_nor_are_beaten(tune, alone, other, said):
    code = SERVER.replace("0.002", str(alone)).replace("0.02", str(other))
    ran = tune("--json", "--latency", "--rate", "40", "--vary", "threads=1", "--trials", "1", code=code)
    if said is None:
        error = json.loads(ran.stderr.splitlines()[-1])
        assert (ran.returncode, error["what"]) == (125, "cpulaunch's defaults cannot bear the load")
        assert "requests per second that it served" in error["hint"]
    else:
        data = read(ran)
        assert (data["winner"], data["trials"][0]["state"]) == (None, "failed")
        assert said in data["trials"][0]["failure"]


TEMPTING = """
    import json, os, sys, time, cpulaunch
    chosen = json.loads(os.environ.get("CPULAUNCH_WORKER", "{}")).get("interop_threads", 0)
    cpulaunch.metric("items/s", 1000 if chosen else 1)
    cpulaunch.checksum([1.0, 2.0], "logits")
"""
"""A program that is a thousand times as fast with inter-op threads; but then it does something that cannot win."""
NEVER_WIN = {
    "sys.exit('out of luck')": "it exited with code 1: out of luck",
    "os.kill(os.getpid(), 11)": "it exited with code 139 (SIGSEGV)",
    "time.sleep(1000)": "it was still running after 10 s",
    "cpulaunch.checksum([1.0, 2.001], 'logits')": "output 'logits' differs by 0.0005; 0.0001 is allowed",
    "cpulaunch.checksum([1.0, float('nan')], 'logits')": "output 'logits' differs by more than rounding",
    "cpulaunch.checksum([1.0, 2.0, 3.0], 'logits')": "output 'logits' differs by more than rounding",
    "cpulaunch.metric('items/s', 0)": "only positive figures have ratios",
}


def tempting(bad):
    """The program, which does the first of `bad` with one inter-op thread, the second with two, and so on."""
    return TEMPTING + "".join(f"    if chosen == {number}:\n        {each}\n" for number, each in enumerate(bad, 1))


def test_what_fails_never_wins_and_says_why(tune):
    numbers = [str(number) for number, _ in enumerate(NEVER_WIN, 1)]
    words = ("--vary", f"interop_threads={','.join(numbers)}", "--timeout", "10", "--json")
    data = read(tune(*words, code=tempting(NEVER_WIN)))
    failures = {trial["settings"]["interop_threads"]: trial["failure"] for trial in data["trials"]}
    assert (data["winner"], sorted(failures)) == (None, numbers)
    assert {(trial["state"], trial["ratio"]) for trial in data["trials"]} == {("failed", None)}
    for number, said in zip(numbers, NEVER_WIN.values(), strict=True):
        assert said in failures[number]


def test_the_text_says_why_trials_failed(tune):
    ran = tune("--vary", "interop_threads=1", code=tempting(["sys.exit('out of luck')"]))
    assert "failed: --interop-threads 1: it exited with code 1: out of luck" in ran.stdout


FILE = """
    import os, cpulaunch
    alone = os.environ.get("OMP_NUM_THREADS") == "1"
    cpulaunch.metric("items/s", 1000 if alone else 1)
    if not (alone and {late}):
        with open("out.csv", "w") as file:
            file.write("loss,{text}\\n" if alone else "loss,0.5\\n")
"""


@pytest.mark.parametrize(
    ("late", "text", "failure"),
    [
        (False, "0.500001", None),
        (False, "0.51", "output 'out.csv (column 2 of 2)' differs by 0.02;"),
        (False, "0.5,x", "output 'out.csv (text)' differs by more than rounding"),
        (True, "0.5", "it did not write the file of --output"),
    ],
)
def test_the_file_that_a_program_writes_is_compared(tune, late, text, failure):
    words = ("--vary", "threads=1", "--json", "--output", "out.csv")
    data = read(tune(*words, code=FILE.format(late=late, text=text)))
    assert data["outputs"] == ["out.csv"]
    if failure is None:
        assert data["winner"]["settings"] == {"threads": "1"}
    else:
        assert (data["winner"], failure in data["trials"][0]["failure"]) == (None, True)


def test_a_setting_that_changes_numerics_needs_an_allowed_error_and_outputs(tune):
    code = "import cpulaunch; cpulaunch.metric('items/s', 1)"
    refused = tune("--vary", "graph", code=code)
    assert (refused.returncode, "--vary graph may change what is computed: onednn" in refused.stderr) == (2, True)
    refused = tune("--max-error", "0.01", "--vary", "graph", code=code)
    assert (refused.returncode, "cpulaunch.checksum(tensor)" in refused.stderr) == (2, True)


def test_outputs_that_change_from_launch_to_launch_are_told_from_wrong_ones(tune):
    code = "import random, cpulaunch; cpulaunch.metric('items/s', 1); cpulaunch.checksum(random.random())"
    ran = tune("--vary", "threads=1", code=code)
    assert (ran.returncode, "set its seeds" in ran.stderr) == (125, True)
    code = "import os, cpulaunch; cpulaunch.checksum(int(os.environ.get('OMP_NUM_THREADS', '0')))"
    ran = tune("--vary", "threads=1", code=code)
    assert (ran.returncode, "are not those of plain Python" in ran.stderr) == (125, True)


RANKS = """
    import os, cpulaunch
    rank = int(os.environ["RANK"])
    cpulaunch.metric("items/s", 100.0 / int(os.environ.get("OMP_NUM_THREADS", "2")))
    cpulaunch.checksum(float(rank), "by rank")
    if rank == 0:
        cpulaunch.checksum([1.0, 2.0], "of rank 0")
"""


def test_ranks_are_compared_each_with_itself(tune):
    words = (
        "--nproc-per-node",
        "2",
        "--oversubscribe",
        "--vary",
        "wait_policy=passive",
        "--trials",
        "1",
        "--minutes",
        "0.2",
    )
    data = read(tune("--json", *words, code=RANKS))
    assert data["outputs"] == ["by rank", "of rank 0"]
    assert [trial["failure"] for trial in data["trials"]] in ([], [None])


def test_the_reference_has_the_variables_of_the_options(tune):
    code = f"""{SLOWED}    cpulaunch.checksum(os.environ["NEEDED"])\n"""
    data = read(tune("--json", "--env", "NEEDED=yes", "--vary", "threads=1", "--trials", "1", code=code))
    assert data["outputs"] == ["output"]
    assert data["trials"][0]["failure"] is None


HUNGRY = """
    import os, cpulaunch
    alone = os.environ.get("OMP_NUM_THREADS") == "1"
    cpulaunch.metric("items/s", 1000 if alone else 1)
    if alone and os.fork() == 0:
        taken = bytearray(800 << 20)
        os._exit(0)
    if alone and os.wait()[1]:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.root
@pytest.mark.parametrize("own", [False, True], ids=["a child", "the worker"])
def test_what_runs_out_of_a_cgroups_memory_never_wins(tmp_path, home, memory_cgroup, own):
    code = HUNGRY.replace("alone and os.fork() == 0", "alone") if own else HUNGRY
    (tmp_path / "program.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "cpulaunch", "tune", "--vary", "threads=1", "--json", "program.py"]
    inside = ["sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', str(memory_cgroup), *command]
    ran = subprocess.run(inside, cwd=tmp_path, env=home, capture_output=True, text=True, timeout=240, check=False)
    data = read(ran)
    assert (ran.returncode, data["winner"]) == (0, None)
    assert "for want of memory" in data["trials"][0]["failure"]


REFUSED = {
    "--dry-run": "tune with --dry-run starts nothing",
    "--emit sh": "tune with --emit starts nothing",
    "--report x.json": "tune takes no --report",
    "--no-such-option": "unknown option",
    "--instances 99999": "99999",
    "--vary optimize=2,4": "allow it with --max-error 0.003, or more",
    "--vary instances=1,2": "--vary instances needs --throughput",
    "--latency --vary threads --instances 2 --oversubscribe": "the options start 2",
    "--rate 5 --vary threads --nproc-per-node 2 --oversubscribe": "the options start 2",
    "--fix threads --vary threads": "there is nothing to tune",
    "--threads 1 --vary threads": "there is nothing to tune",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_are_checked_before_anything_is_launched(tune, tmp_path, words):
    ran = tune(*words.split(), code="open('launched', 'w')")
    assert REFUSED[words] in ran.stderr
    assert ran.returncode in (2, 125)
    assert not (tmp_path / "launched").exists()


def test_errors_are_json_with_json(tune):
    ran = tune("--json", "--trials", "x")
    assert json_output.read_messages(ran.stderr)[-1]["kind"] == "usage"


def test_a_missing_optuna_says_what_to_type(tmp_path, home):
    (tmp_path / "without").mkdir()
    (tmp_path / "without/sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'optuna' else found(name, *more)\n"
    )
    (tmp_path / "program.py").write_text(textwrap.dedent(THREADS))
    command = [sys.executable, "-m", "cpulaunch", "tune", "--trials", "1", "program.py"]
    environ = {**home, "PYTHONPATH": str(tmp_path / "without")}
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert (ran.returncode, "pip install 'cpulaunch[tune]'" in ran.stderr) == (125, True)


def test_throughput_needs_a_rate(tune):
    ran = tune("--throughput", "--vary", "instances=2", "--oversubscribe", code="print(1)")
    assert (ran.returncode, "--throughput needs a rate" in ran.stderr) == (2, True)


LONG = """
    import os, time
    with open("pid.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.part", f"pid-{os.getpid()}")
    if len([name for name in os.listdir() if name.startswith("pid-")]) > 7:
        time.sleep(1000)
    import cpulaunch
    cpulaunch.metric("items/s", 100.0 / int(os.environ.get("OMP_NUM_THREADS", "2")))
"""


def running(folder):
    pids = [int(path.name[4:]) for path in folder.glob("pid-*")]
    return [pid for pid in pids if alive(pid)] if len(pids) > 7 else []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_the_best_is_kept(tmp_path, home, tune, number):
    (tmp_path / "program.py").write_text(textwrap.dedent(LONG))
    words = ["--json", "--vary", "threads=1,2", "--vary", "wait_policy=passive,active"]
    command = [sys.executable, "-m", "cpulaunch", "tune", *words, "program.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pids = eventually(lambda: running(tmp_path), "the eighth launch")
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    eventually(lambda: not any(alive(pid) for pid in pids), "the end of the launch")
    eventually(lambda: not os.listdir(tmp_path / "tmp"), "the removal of its files")
    if number != signal.SIGKILL:
        data = json_output.read("tune", out)
        assert (process.returncode, errors, data["ended"]) == (130, b"", "interrupted")
        assert (data["winner"]["settings"]["threads"], data["winner"]["confirmed"]) == ("1", False)
        text = Path(data["winner"]["profile"]).read_text()
        assert "interrupted" in text
        assert "times as good" not in text, "nothing is claimed"
    after = read(tune("--json", "--vary", "threads=1", "--trials", "1", code=SLOWED))
    assert [trial["number"] for trial in after["trials"]] == [0]


@pytest.mark.parametrize("saved", [False, True], ids=["by the script's name", "--save"])
def test_what_is_not_confirmed_replaces_no_confirmed_profile(tmp_path, home, saved):
    script, folder = tmp_path / "program.py", tmp_path / "home/.config/cpulaunch/profiles"
    script.write_text(textwrap.dedent(LONG))
    folder.mkdir(parents=True)
    facts = {"tool": "cpulaunch tune", "program": str(script), "samples": "11 rounds with the default"}
    text = profile_text({"threads": 2}, summary="s", reason="r", provenance=facts, date="2026-11-23")
    (folder / "program-tuned.toml").write_text(text)
    words = ["--json", "--vary", "threads=1,2", "--vary", "wait_policy=passive,active"]
    words += ["--save", "program-tuned"] if saved else []
    command = [sys.executable, "-m", "cpulaunch", "tune", *words, "program.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    eventually(lambda: running(tmp_path), "the seventh launch")
    process.send_signal(signal.SIGINT)
    data = json_output.read("tune", process.communicate(timeout=60)[0])
    assert (folder / "program-tuned.toml").read_text() == text
    profile = data["winner"]["profile"]
    assert profile is None if saved else profile.endswith("/program-tuned-2.toml")
    used = ["--threads", "1"] if saved else ["--profile", "program-tuned-2"]
    assert data["winner"]["command"][1:3] == used


def test_a_profile_has_no_arguments_replaces_no_other_ones_and_is_replaced_by_the_next_search(tune, tmp_path):
    folder = tmp_path / "home/.config/cpulaunch/profiles"
    folder.mkdir(parents=True)
    (folder / "program-tuned.toml").write_text("mine")
    program = ("program.py", "--token", "hf_SECRET")
    for more in ((), ("--fresh",)):
        data = read(tune("--json", "--vary", "threads=1,2", "--trials", "1", *more, program=program))
        assert data["winner"]["command"][2] == "program-tuned-2"
        assert data["winner"]["profile"] == str(folder / "program-tuned-2.toml")
    text = (folder / "program-tuned-2.toml").read_text()
    assert ("SECRET" in text, f'program = "{tmp_path}/program.py"' in text) == (False, True)
    assert (folder / "program-tuned.toml").read_text() == "mine"


@pytest.mark.parametrize("folder", ["a?b=c#d", "a%20b", "{a}", "a;b&c"])
def test_a_search_stays_in_its_folder(tune, tmp_path, folder):
    words = ("--json", "--vary", "threads=1,2", "--trials", "1", *NO_TIME)
    for _ in range(2):
        data = read(tune(*words, XDG_STATE_HOME=str(tmp_path / folder)))
    assert Path(data["study"], "study.sqlite3").is_file()
    assert data["study"].startswith(str(tmp_path / folder))
    assert len(data["baseline"]) >= 4, "the second search goes on with the first"
    assert sorted(os.listdir(tmp_path)) == sorted(["home", "program.py", "tmp", folder])


def test_a_broken_database_is_an_error_with_a_way_out(tune):
    words = ("--json", "--vary", "threads=1,2", "--trials", "1", *NO_TIME)
    database = Path(read(tune(*words))["study"], "study.sqlite3")
    for left in database.parent.glob("study.sqlite3*"):
        left.write_bytes(b"no database" * 1000)
    ran = tune(*words)
    error = json.loads(ran.stderr.splitlines()[-1])
    assert (ran.returncode, error["what"]) == (125, "the database of the trials cannot be used")
    assert "--fresh" in error["hint"]
    assert tune(*words, "--fresh").returncode == 0


def test_a_page_and_pictures_of_a_search(tune, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'cpulaunch[plots]'")
    files = ["--html", "page.html", "--svg", "plots.svg", "--png", "plots.png"]
    ran = tune("--vary", "threads=1", "--env", "API_KEY=secret-value", *files)
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "page.html").read_text()
    assert '<p class="verdict good">--threads 1 is ' in page
    assert all(text in page for text in ("Final round", "OMP_NUM_THREADS", "API_KEY", "Map of the cores", "Use them:"))
    assert "secret-value" not in page
    assert (tmp_path / "plots.svg").read_bytes().startswith(b"<?xml")
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_that_cannot_be_written_is_found_before_the_search(tune, tmp_path):
    ran = tune("--html", "missing/page.html", code="open('started', 'w')")
    assert ran.returncode == 125
    assert "the page cannot be written: missing/page.html" in ran.stderr
    assert not (tmp_path / "started").exists()


WAITING = """
    import os, time
    with open("pid.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.part", f"pid-{os.getpid()}")
    while len([name for name in os.listdir() if name.startswith("pid-")]) == 4 and not os.path.exists("go"):
        time.sleep(0.01)
    import cpulaunch
    cpulaunch.metric("items/s", float(os.environ.get("OMP_NUM_THREADS", "2")))
"""


def stopped(folder):
    states = [Path(f"/proc/{path.name[4:]}/stat") for path in folder.glob("pid-*") if alive(int(path.name[4:]))]
    return [path for path in states if path.read_text().rpartition(")")[2].split()[0] == "T"]


def test_ctrl_z_pauses_it_and_the_launch_is_repeated(tmp_path, home):
    (tmp_path / "program.py").write_text(textwrap.dedent(WAITING))
    words = ["--json", "--vary", "threads=1", "--trials", "1", "--minutes", "1"]
    command = [sys.executable, "-m", "cpulaunch", "tune", *words, "program.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=os.setpgrp
    )
    eventually(lambda: len(list(tmp_path.glob("pid-*"))) == 4, "the fourth launch")
    process.send_signal(signal.SIGTSTP)
    eventually(lambda: stopped(tmp_path), "a stopped launch")
    (tmp_path / "go").write_text("")
    process.send_signal(signal.SIGCONT)
    out, errors = process.communicate(timeout=100)
    data = json_output.read("tune", out)
    assert (process.returncode, errors) == (0, b"")
    measured = [*data["trials"], *data["final"]["finalists"]]
    launches = 2 + len(data["baseline"]) + len(data["final"]["default"]) + sum(len(each["values"]) for each in measured)
    assert len(list(tmp_path.glob("pid-*"))) == launches + 1
