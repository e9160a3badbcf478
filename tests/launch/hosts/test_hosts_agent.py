"""The agent on one host: no process outlives a kill of another one, and its ranks are the planned ones."""

import os
import signal
from collections import Counter

import pytest
from two_hosts import HERE, Local, eventually

from cpulaunch.system.libc import is_linux
from cpulaunch.system.process_state import children_of
from tests.launch.launching import python
from tests.launch.process.test_hostile_workers import may_trace
from tests.launch.ranks.jobs import free_port, knows_torchrun

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WAIT = HERE / "waiting_rank.py"
JOB = ["--nnodes", "1:2", "--nproc-per-node", 2, "--rdzv-backend", "c10d"]
CONF = ["--rdzv-conf", "last_call_timeout=1", "--grace", 10]


@pytest.fixture
def host(tmp_path):
    host = Local(tmp_path)
    yield host
    host.close()


def endpoint():
    """A port that is free and stays so, unless another test draws the same one."""
    return ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]


def family(run):
    """The pids of guard, supervisor, agent and ranks, once both ranks run."""
    eventually(lambda: len(run.reports) == 2, f"two ranks: {run.err}")
    (inner_guard,) = children_of(run.process.pid)
    (supervisor,) = children_of(inner_guard)
    (agent,) = children_of(supervisor)
    return {"guard": run.process.pid, "supervisor": supervisor, "agent": agent, "rank": run.reports[0]["pid"]}


@pytest.mark.parametrize(("victim", "code"), [("guard", -9), ("supervisor", 137), ("agent", 125), ("rank", 137)])
def test_nothing_outlives_a_kill_of_any_process(host, victim, code):
    run = host.cpulaunch(*JOB, *endpoint(), *CONF, WAIT)
    os.kill(family(run)[victim], signal.SIGKILL)
    assert run.wait() == code, run.err
    run.gone()
    if victim in ("agent", "rank"):  # Otherwise no process is left that could report it.
        assert "SIGKILL" in run.err
    assert not list(host.dir.glob("cpulaunch-*"))


def test_a_rank_that_was_ended_while_it_wrote_its_error_decides_the_exit_code(host):
    code = 'printf \'{"message": {"mess\' > "$TORCHELASTIC_ERROR_FILE"; exit 3'
    run = host.cpulaunch(*JOB, *endpoint(), *CONF, "--no-python", "sh", "-c", code)
    assert run.wait() == 3, run.err
    assert "failed (exit code 3)" in run.err


LEAVES_A_CHILD = """
import os, signal, time
if os.environ["LOCAL_RANK"] == "0":
    os.open(f"/dev/shm/{os.getpid()}:{os.getuid()}:0", os.O_RDWR | os.O_CREAT, 0o600)
    print(os.getpid(), flush=True)
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_the_shared_memory_of_a_killed_rank_that_its_child_uses_is_removed_after_the_child(host):
    """As a DataLoader's workers have what the rank had mapped when it forked them."""
    (host.dir / "rank.py").write_text(LEAVES_A_CHILD)
    run = host.cpulaunch(*JOB, *endpoint(), *CONF, host.dir / "rank.py")
    assert run.wait() == 137, run.err
    path = f"/dev/shm/{run.out.strip()}:{os.getuid()}:0"
    left = os.path.exists(path)
    if left:
        os.unlink(path)
    assert not left


@pytest.mark.parametrize("signal", ["STOP", "TTIN", "TSTP"])
def test_a_rank_that_stops_the_agent_fails_all_the_same(host, signal):
    run = host.cpulaunch(*JOB, *endpoint(), *CONF, "--no-python", "sh", "-c", f"kill -{signal} $PPID; exit 3")
    assert run.wait() == 3, run.err
    run.gone()


TRACES_THE_AGENT = """
import ctypes, os, signal
ptrace, agent = ctypes.CDLL(None).ptrace, os.getppid()
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
        ptrace(request, agent, 0, 0)
    os.write(write, b"1")
    signal.pause()
os.read(read, 1)
os._exit(3)
"""


def test_a_rank_that_stops_the_agent_by_a_trace_fails_all_the_same(host):
    if not may_trace():
        pytest.skip("may not trace its parent")
    run = host.cpulaunch(*JOB, *endpoint(), *CONF, "--grace", 1, "--no-python", *python(TRACES_THE_AGENT))
    assert run.wait() == 3, run.err
    assert "did not notice that a worker failed (exit code 3)" in run.err
    run.gone()


def test_signals_reach_the_ranks_and_sigterm_ends_them(host):
    run = host.cpulaunch(*JOB, *endpoint(), *CONF, WAIT)
    family(run)
    run.process.send_signal(signal.SIGUSR1)
    eventually(lambda: len(run.reports) == 4, "a signal in each rank")
    assert sorted(each["signal"] for each in run.reports if "signal" in each) == ["0", "1"]
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    run.gone()
    assert {each.get("shared_store") for each in run.reports} == {None}


PRINTS_IN_PLACE_OF_THE_AGENT = """
import os, sys
if os.environ["LOCAL_RANK"] == "0":
    sys.stdout.write(("x" * 99 + "\\n") * 20_000 + "end\\n")
else:
    agent = os.open(f"/proc/{os.getppid()}/fd/1", os.O_WRONLY)
    for _ in range(1000):
        for _ in range(100):
            os.write(agent, b"message\\n")
        with open("run-0.out", "rb") as shown:
            if b"]:end" in shown.read():
                break
"""


@pytest.mark.skipif(not is_linux(), reason="other systems show no process's pipes")
def test_what_the_agent_itself_prints_does_not_come_into_the_middle_of_a_logs_lines(host):
    """As messages of torch's C++ code, which no lock keeps back."""
    program = ["--log-dir", host.dir / "logs", "--no-python", *python(PRINTS_IN_PLACE_OF_THE_AGENT)]
    run = host.cpulaunch(*JOB, *endpoint(), *CONF, *program)
    assert run.wait() == 0, run.err
    lines = Counter(run.out.splitlines())
    messages = lines.pop("message")
    assert lines == {f"[default0]:{'x' * 99}": 20_000, "[default0]:end": 1}, messages


SIGNALLED_WHILE_IT_IS_ENDED = """
import os, signal, sys, time
def end(*_):
    if "signalled" in globals():
        os._exit(0)
    globals()["signalled"] = True
    print("{}", flush=True)
if os.environ["LOCAL_RANK"] == "0":
    signal.signal(signal.SIGTERM, end)
    open("ready", "w").close()
    time.sleep(600)
while not os.path.exists("ready"):
    time.sleep(0.01)
sys.exit(3)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_a_failure_leaves_its_exit_code_and_forbids_a_restart(host, number):
    """Rank 0 takes its time to end when rank 1 has failed, as on one host."""
    program = ["--grace", 60, "--max-restarts", 1, "--no-python", *python(SIGNALLED_WHILE_IT_IS_ENDED)]
    run = host.cpulaunch(*JOB, *endpoint(), *CONF, *program)
    eventually(lambda: run.reports, f"the end of rank 0: {run.err}")
    run.process.send_signal(number)
    assert run.wait() == 3, run.err
    assert "rank 1 " in run.err
    run.gone()


@pytest.mark.skipif(not knows_torchrun("--virtual-local-rank"), reason="the agent of this torch has no such option")
def test_ranks_get_their_own_arguments_and_cpus_by_their_real_local_rank(host):
    program = ["--run-path", WAIT, "a b", "$HOME", "${local_rank}"]
    run = host.cpulaunch(*JOB, *endpoint(), *CONF, "--virtual-local-rank", *program)
    assert run.wait() == 0, run.err
    assert {report["local_rank"] for report in run.reports} == {"0"}
    assert sorted(report["argv"][2] for report in run.reports) == ["0", "1"]
    assert {tuple(report["argv"][:2]) for report in run.reports} == {("a b", "$HOME")}
    assert {report["main"] for report in run.reports} == {"__main__"}
    assert len({tuple(report["cpus"]) for report in run.reports}) == min(2, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("program", "code"), [("import torch", 0), ("pass", 125)], ids=["torch", "no-torch"])
def test_strict_notices_ranks_without_the_plugin_for_their_settings(host, tmp_path, program, code):
    script = tmp_path / "script.py"
    script.write_text(program)
    # One rank: two would share the core of a small host, which --strict refuses.
    job = ["--nnodes", "1:2", "--nproc-per-node", 1, "--rdzv-backend", "c10d"]
    run = host.cpulaunch(*job, *endpoint(), *CONF, "--strict", "--flush-denormal", "--binder", "none", script)
    assert (run.wait(), "--flush-denormal" in run.err) == (code, code == 125), run.err
