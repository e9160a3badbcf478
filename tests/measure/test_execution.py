"""Samples of real launches: where the figure comes from, how launches fail, and that nothing is left of them."""

import contextlib
import json
import math
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from cpulaunch.launch.process.run_directory import make_private_path, remove_run_directory
from cpulaunch.measure import execution
from cpulaunch.measure.child_process import ChildResult, ChildSetup, Pauses
from cpulaunch.measure.execution import LaunchSetup, plain_command, take_sample
from cpulaunch.measure.samples import MetricChoice, Side
from cpulaunch.records.errors import LaunchError, NoSpaceError
from cpulaunch.records.record import replace
from cpulaunch.records.request import Program
from tests.launch.launching import alive, eventually
from tests.launch.process.test_hostile_workers import may_trace
from tests.strangers import needs_root

PYTHON = Side(label="python", plain=True)
DEFAULTS = Side(label="cpulaunch")
SIDES = pytest.mark.parametrize("side", [PYTHON, DEFAULTS], ids=["python", "cpulaunch"])


@pytest.fixture
def setup(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir()
    return LaunchSetup(child=ChildSetup(environ=dict(os.environ)), folder=str(folder))


@pytest.fixture
def sample(tmp_path, setup):
    """A function that takes a sample of a script's text."""

    def run(code, side, *args, choice=None, limit=120.0, setup=setup):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(code))
        return take(side, "script", str(script), *args, choice=choice, limit=limit, setup=setup)

    return run


KINDS = {"script": (), "module": ("-m",), "command": ("--no-python",)}


def take(side, kind, target, *args, setup, choice=None, limit=120.0):
    """A sample of a program."""
    program = Program(kind=kind, target=target, args=args, interpreter="" if kind == "command" else sys.executable)
    return take_sample(
        side,
        (*KINDS[kind], target, *args),
        choice=choice or MetricChoice(),
        limit_seconds=limit,
        setup=replace(setup, plain=plain_command(program)),
    )


@SIDES
def test_a_metric_of_the_program_is_the_value(sample, side):
    code = "import cpulaunch; cpulaunch.metric('items/s', 3); cpulaunch.metric('items/s', 4.5)"
    found = sample(code, side, choice=MetricChoice(name="items/s"))
    assert (found.value, found.failure, found.metrics) == (4.5, None, {"items/s": 4.5})


@SIDES
def test_a_pattern_finds_the_last_number_of_either_stream(sample, side):
    code = "import sys; print('rate: 1.5', flush=True); sys.stderr.write('rate: 2.5')"
    assert sample(code, side, choice=MetricChoice(pattern="rate: ([0-9.]+)")).value in (1.5, 2.5)
    code = "print('rate: 1.5'); print('rate: 2.5')"
    assert sample(code, side, choice=MetricChoice(pattern="rate: ([0-9.]+)")).metrics == {"rate": 2.5}


def test_a_match_that_is_no_number_is_named(sample):
    found = sample("print('rate: 1,234.5')", PYTHON, choice=MetricChoice(pattern="rate: ([0-9.,]+)"))
    assert (found.value, found.failure) == (None, "it printed '1,234.5' for 'rate', which is not a number")


@SIDES
def test_wall_time_is_the_value_without_a_metric(sample, side):
    found = sample("pass", side)
    assert found.value == found.seconds > 0


@SIDES
def test_outputs_of_both_sides_can_be_compared(sample, side):
    found = sample("import cpulaunch; cpulaunch.checksum([1.5, 2.5], 'logits')", side)
    assert [part["numbers"] for part in found.checksums["logits"]] == [[1.5, 2.5]]


def test_rates_of_several_workers_are_summed_and_not_their_times(sample):
    code = "import cpulaunch; cpulaunch.metric('items/s', 3); cpulaunch.metric('ms', 5); print('cost: 7')"
    side = Side(label="two", options=("--instances", "2", "--oversubscribe"))
    found = sample(code, side, choice=MetricChoice(pattern="cost: ([0-9]+)", lower_is_better=True))
    assert (found.value, found.metrics["items/s"], found.metrics["ms"]) == (7, 6, 5)
    assert sample(code, side, choice=MetricChoice(name="items/s", lower_is_better=False)).value == 6


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (MetricChoice(name="latency p95 (ms)"), "1 of 2 instances reported no metric"),
        (MetricChoice(pattern="took ([0-9]+)"), "1 of 2 instances printed no number that --metric matches"),
        (MetricChoice(), None),
    ],
)
def test_an_instance_without_the_figure_leaves_no_figure(sample, tmp_path, choice, said):
    code = f"""
        import os, cpulaunch
        try:
            os.close(os.open({str(tmp_path / "first")!r}, os.O_CREAT | os.O_EXCL))
            cpulaunch.metric("latency p95 (ms)", 1)
            print("took 1")
        except OSError:
            pass  # A program that hides what went wrong in it.
    """
    found = sample(code, Side(label="two", options=("--instances", "2", "--oversubscribe")), choice=choice)
    assert (found.failure is None) is (said is None)
    assert said is None or said in found.failure


def test_plain_python_has_nothing_of_cpulaunch_but_the_way_for_metrics(sample):
    code = """
        import os, cpulaunch
        names = [name for name in os.environ if name.startswith(("CPULAUNCH", "OMP", "LD_PRELOAD"))]
        cpulaunch.metric("variables", len(names))
        cpulaunch.metric("cpus", len(os.sched_getaffinity(0)))
    """
    found = sample(code, PYTHON, choice=MetricChoice(name="cpus"))
    assert found.metrics["variables"] == 1 + sum(name.startswith(("OMP", "LD_PRELOAD")) for name in os.environ)
    assert found.value == len(os.sched_getaffinity(0))


def test_without_reports_a_launch_becomes_its_worker(sample, setup):
    quick = LaunchSetup(child=setup.child, folder=setup.folder, reports=False)
    found = sample(
        "import os, sys; sys.exit(os.getppid() != int(sys.argv[1]))", DEFAULTS, str(os.getpid()), setup=quick
    )
    assert (found.failure, found.report) == (None, None)


ASKS = """
import os, sys
from cpulaunch.measure.child_process import ChildSetup, run_child
open("/dev/tty").close()
asking = (sys.executable, "-c", "open('/dev/tty').readline()")
found = run_child(asking, ChildSetup(environ=dict(os.environ)), limit_seconds=20)
print(found.exit_code, found.stderr_tail[-80:])
"""


def test_a_program_has_no_terminal_to_ask():
    child, terminal = pty.fork()
    if child == 0:  # The shell leads the session.
        os.execv("/bin/sh", ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", ASKS])
    seen = b""
    with contextlib.suppress(OSError):  # Its end, once all have closed it.
        while data := os.read(terminal, 1 << 16):
            seen += data
    os.waitpid(child, 0)
    assert b"1 b" in seen
    assert b"No such device or address" in seen


FAILURES = {
    "exit": ("import sys; sys.exit('no such model')", 1, "exited with code 1: no such model"),
    "error": ("raise ValueError('bad shape')", 1, "ValueError: bad shape"),
    "signal": ("import os; os.kill(os.getpid(), 11)", None, "SIGSEGV|139"),
}


@SIDES
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_launch_has_no_value_and_says_why(sample, side, name):
    code, exit_code, text = FAILURES[name]
    found = sample(code, side)
    assert found.value is None
    assert exit_code is None or found.exit_code == exit_code
    assert any(each in found.failure for each in text.split("|")), found.failure


@SIDES
@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(None, "reported no metric 'rate'"), (-1, "positive"), (0, "positive")],
        *[("1e250", "beyond all measure"), ("1e-250", "beyond all measure")],
    ],
)
def test_a_launch_without_a_usable_metric_fails(sample, side, value, text):
    code = "pass" if value is None else f"import cpulaunch; cpulaunch.metric('rate', {value})"
    found = sample(code, side, choice=MetricChoice(name="rate"))
    assert found.value is None
    assert text in found.failure


@pytest.mark.parametrize(
    ("name", "hint"), [(r"rate: [0-9.]+", True), (r"rate: \d+", True), ("rate", False), ("latency p99 (ms)", False)]
)
def test_a_pattern_without_a_group_is_told_what_it_lacks(sample, name, hint):
    found = sample("print('rate: 5')", PYTHON, choice=MetricChoice(name=name))
    assert f"it reported no metric {name!r}" in found.failure
    assert ("parentheses around the number" in found.failure) is hint


OVERLOADED = """
    import time, cpulaunch
    seconds = [0.0]
    time.perf_counter, time.sleep = lambda: sum(seconds), seconds.append
    for number in cpulaunch.requests(500, 60, warm_up=0):
        time.sleep(0.006)
"""
"""Requests by a clock of the program's own: other load of the machine takes none of its time."""


@SIDES
def test_latencies_beyond_the_capacity_are_no_figures_but_the_capacity_is(sample, side):
    found = sample(OVERLOADED, side, choice=MetricChoice(name="latency p95 (ms)"))
    assert (found.value, found.exit_code) == (None, 0)
    assert "its queue grows" in found.failure
    found = sample(OVERLOADED, side, choice=MetricChoice(name="requests/s", lower_is_better=False))
    assert found.value == pytest.approx(166, rel=0.02), found.failure


LEAVES_A_CHILD = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"],
        stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    time.sleep(float(sys.argv[2]))
"""


@SIDES
@pytest.mark.parametrize(("stays", "limits"), [(0, [120]), (1000, [8, 32, 128])], ids=["ends", "hangs"])
def test_nothing_that_it_started_is_left(sample, tmp_path, side, stays, limits):
    told = tmp_path / "pids"
    for limit in limits:  # A busy machine may take longer than the first to start it.
        found = sample(LEAVES_A_CHILD, side, str(told), str(stays), limit=limit)
        if told.exists():
            break
    assert (found.failure is None) == (stays == 0), found.failure
    assert stays == 0 or f"still running after {limit} s" in found.failure
    assert not any(alive(int(pid)) for pid in told.read_text().split())


def test_a_program_that_removes_the_folder_of_all_launches_ends_them_with_a_sentence(sample, setup):
    assert sample(f"import shutil; shutil.rmtree({setup.folder!r})", PYTHON).failure is None
    with pytest.raises(LaunchError, match="cannot make a folder for the figures of a launch"):
        sample("pass", PYTHON)


IN_A_FULL_FOLDER = """
import os, sys
from cpulaunch.measure import execution
from cpulaunch.measure.child_process import ChildSetup
from cpulaunch.measure.execution import LaunchSetup, take_sample
from cpulaunch.measure.samples import MetricChoice, Side
setup = LaunchSetup(child=ChildSetup(environ={}), folder=sys.argv[1], plain=("true",))
make = execution.make_spare_folder
execution.make_spare_folder = lambda environ: print(path := make(environ)) or path
side = Side(label="python", plain=True)
for _ in range(2):
    print(take_sample(side, ("--no-python", "true"), choice=MetricChoice(), limit_seconds=60, setup=setup).failure)
    print(len(os.listdir("/proc/self/fd")))
"""


@needs_root
@pytest.mark.parametrize("size", ["nr_inodes=1", "nr_inodes=2", "size=4k"])
def test_where_the_folder_of_all_launches_is_full_a_launch_has_another_one(setup, size):
    full = f'mount -t tmpfs -o {size} tmpfs {setup.folder} && exec "$@"'
    command = ("unshare", "--mount", "sh", "-c", full, "sh", sys.executable, "-c", IN_A_FULL_FOLDER, setup.folder)
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    folder, failure, count, *again = found.stdout.split()
    assert failure == "None"
    assert again[1:] == [failure, count]  # No descriptor stays open.
    assert not any(map(os.path.exists, (folder, again[0])))


def test_a_folder_elsewhere_that_becomes_full_is_removed(monkeypatch, tmp_path):
    def fails(folder, workers):
        raise NoSpaceError("no space left")

    monkeypatch.setattr(execution, "make_event_files", fails)
    tmp_path.chmod(0o700)
    with pytest.raises(NoSpaceError):
        execution._spare_folder({"TMPDIR": str(tmp_path)})
    assert not list(tmp_path.iterdir())


TRACED_BY_ITS_DAEMON = """
    import ctypes, os, sys, time
    program = os.getpid()
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        traces = ctypes.CDLL(None).ptrace(0x4206, program, 0, 0)
        os.write(write, b"%d %d" % (traces, os.getpid()))
        time.sleep(1000)
    os.wait()
    traces, daemon = os.read(read, 30).split()
    with open(sys.argv[1], "wb") as file:
        file.write(daemon)
    sys.exit(0 if traces == b"0" else "it cannot trace")
"""


@pytest.mark.skipif(not may_trace() or not hasattr(os, "pidfd_open"), reason="may not trace its parent")
def test_the_end_of_a_program_is_seen_while_its_own_daemon_traces_it(sample, tmp_path):
    found = sample(TRACED_BY_ITS_DAEMON, PYTHON, str(tmp_path / "daemon"), limit=30.0)
    assert found.failure is None
    assert found.value < 20
    assert not alive(int((tmp_path / "daemon").read_text()))


ENDS_ITS_LAUNCH = """
    import os, sys
    launch, process = [], os.getppid()
    while b"--report" in (words := open(f"/proc/{process}/cmdline", "rb").read().split(b"\\0")):
        launch.append(process)
        report = words[words.index(b"--report") + 1]
        process = int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])
    open(report, "w").write(sys.argv[1])
    os.kill(launch[-1], 9)
    os.kill(launch[0], 9)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="finds its launch in /proc")
@pytest.mark.parametrize(
    "forged",
    ['{"metrics": {"ms": 1}}', '{"metrics": {"ms": {"values": ["x"]}}}', '{"workers": [1]}', '{"plan": 5}'],
)
def test_a_program_that_ends_its_launch_and_writes_the_report_itself_has_failed(sample, setup, tmp_path, forged):
    """Nothing is left of the launch: its inner guard, which lives, removes the run's folder."""
    (tmp_path / "runs").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path / "runs")}
    setup = replace(setup, child=ChildSetup(environ=environ))
    found = sample(ENDS_ITS_LAUNCH, DEFAULTS, forged, choice=MetricChoice(name="ms"), setup=setup)
    assert (found.value, found.report) == (None, None)
    assert found.failure.startswith("SIGKILL ended it")
    assert list((tmp_path / "runs").iterdir()) == []


EXCHANGES_THE_FOLDER = """
    import json, os
    launcher = os.getppid()
    while "--report" not in (words := open(f"/proc/{launcher}/cmdline").read().split("\\0")):
        launcher = int(open(f"/proc/{launcher}/stat").read().rpartition(")")[2].split()[1])
    folder = os.path.dirname(words[words.index("--report") + 1])
    parent, name = os.path.split(folder)
    os.rename(parent, parent + ".moved")
    os.makedirs(folder, 0o700)
    with open(f"{parent}.moved/{name}/report.json", "w") as file:
        metrics = {"throughput": {"sum": 9.0, "values": [9.0]}}
        json.dump({"metrics": metrics, "plan": {"mode": "single"}, "workers": []}, file)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the program finds its launch in /proc")
def test_a_program_that_exchanges_the_folder_of_its_report_has_no_figure(sample, setup, tmp_path):
    folder = str(tmp_path / "locked")
    make_private_path(folder)
    setup = replace(setup, folder=folder)
    try:
        found = sample(EXCHANGES_THE_FOLDER, DEFAULTS, choice=MetricChoice(name="throughput"), setup=setup)
    finally:
        remove_run_directory(folder)
    assert (found.value, found.failure) == (None, "it reported no metric 'throughput'")


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": 5},
        {"plan": {}},
        {"workers": 7},
        {"workers": [3]},
        {"workers": [{"checksums": [1]}]},
        {"metrics": {"x": 3}},
        {"metrics": {"x": {"values": [None]}}},
        {"metrics": {"x": {"values": [1.0, "1e400"]}}},
        {"metrics": {"x": {"values": [10**400]}}},
        {"metrics": {"x": {"values": [math.inf]}}},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_a_report_of_another_form_is_none(tmp_path, changes):
    report = {"plan": {"mode": "single"}, "metrics": {"x": {"values": [1, None]}}, "workers": [{"checksums": {}}]}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert execution._read_report(str(path)) == report
    path.write_text(json.dumps({**report, **changes}))
    assert execution._read_report(str(path)) is None


@SIDES
def test_an_ending_signal_from_the_guards_ends_the_launch(sample, setup, tmp_path, side):
    told = tmp_path / "pids"
    os.mkfifo(tmp_path / "started")
    control, write = os.pipe()
    child = ChildSetup(environ=setup.child.environ, control=control)

    def interrupt():
        with open(tmp_path / "started") as file:
            file.read()
        os.write(write, bytes([signal.SIGWINCH, signal.SIGTERM]))

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = textwrap.dedent(LEAVES_A_CHILD).replace("time.sleep(float", "open('started', 'w').close(); time.sleep(float")
    code = f"import os; os.chdir({str(tmp_path)!r})\n{code}"
    with pytest.raises(KeyboardInterrupt):
        sample(code, side, str(told), "1000", setup=LaunchSetup(child=child, folder=setup.folder))
    thread.join()
    assert not any(alive(int(pid)) for pid in told.read_text().split())
    assert os.listdir(setup.folder) == []


@SIDES
def test_a_pause_stops_the_launch_which_is_repeated(sample, setup, tmp_path, side):
    control, write = os.pipe()
    pauses = Pauses()
    child = ChildSetup(environ=setup.child.environ, control=control, pauses=pauses)
    states = []

    def pause():
        eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "a launch")
        pid = int((tmp_path / "pid").read_text())
        os.write(write, bytes([signal.SIGWINCH, signal.SIGTSTP]))
        eventually(lambda: state(pid) == "T", "a stopped launch")
        states.append("stopped")
        (tmp_path / "go").write_text("")
        os.write(write, bytes([signal.SIGCONT]))

    thread = threading.Thread(target=pause)
    thread.start()
    code = f"""
        import os, pathlib, sys, time
        os.chdir({str(tmp_path)!r})
        with open("launches", "a") as file:
            file.write("x")
        pathlib.Path("new").write_text(str(os.getpid()))
        os.rename("new", "pid")
        while not os.path.exists("go"):
            time.sleep(0.01)
    """
    found = sample(code, side, setup=LaunchSetup(child=child, folder=setup.folder))
    thread.join()
    assert (found.failure, states) == (None, ["stopped"])
    assert (tmp_path / "launches").read_text() == "xx"
    assert pauses.seconds > 0


@SIDES
def test_a_program_that_pauses_each_of_its_launches_fails(sample, side, monkeypatch):
    monkeypatch.setattr(execution, "run_child", lambda *_, **__: next(paused))
    paused = iter([ChildResult(exit_code=0, seconds=1.0, paused=True)] * 20)
    found = sample("pass", side)
    assert (found.value, found.failure) == (None, "each of its 10 launches was paused (Ctrl-Z, SIGTSTP)")
    assert len(list(paused)) == 10


@pytest.mark.parametrize("numbers", [[signal.SIGTSTP, signal.SIGCONT], [signal.SIGCONT], [signal.SIGWINCH]])
def test_a_pause_that_is_over_stops_nothing(sample, setup, numbers):
    control, write = os.pipe()
    os.write(write, bytes(numbers))
    child = ChildSetup(environ=setup.child.environ, control=control)
    assert sample("pass", PYTHON, setup=LaunchSetup(child=child, folder=setup.folder)).failure is None


def test_a_paused_launch_ends_by_an_ending_signal(sample, setup):
    control, write = os.pipe()
    os.write(write, bytes([signal.SIGTSTP]))
    thread = threading.Timer(0.2, os.write, (write, bytes([signal.SIGTERM])))
    thread.start()
    child = ChildSetup(environ=setup.child.environ, control=control)
    with pytest.raises(KeyboardInterrupt):
        sample("import time; time.sleep(1000)", PYTHON, setup=LaunchSetup(child=child, folder=setup.folder))
    thread.join()


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_launches_get_the_signals_that_this_process_had(sample):
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    code = "import signal, sys; sys.exit(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())) != eval(sys.argv[1]))"
    assert sample(code, PYTHON, repr(sorted(int(each) for each in mask))).failure is None


@SIDES
def test_much_output_neither_blocks_nor_is_kept(sample, side):
    code = "import sys; sys.stdout.write('x' * 5_000_000); sys.stderr.write('y' * 5_000_000)"
    assert sample(code, side).failure is None


def test_a_module_and_a_command_run_too(setup):
    for side in (PYTHON, DEFAULTS):
        for program in (("module", "this"), ("command", sys.executable, "-c", "pass")):
            found = take(side, *program, setup=setup)
            assert found.failure is None, (side.label, program, found.failure)
