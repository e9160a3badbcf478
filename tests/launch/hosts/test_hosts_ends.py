"""How torch's agent ends the ranks that another one's failure leaves, and what is left of them in /dev/shm."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from cpulaunch.launch.process.processes import is_child
from cpulaunch.system.files.shared_memory import REGISTERED, SHARED_FOLDER
from cpulaunch.system.libc import is_linux
from tests.launch.launching import eventually

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not os.path.isdir(SHARED_FOLDER), reason="this system has no /dev/shm"),
]

RANK = """
import os, signal, sys, time
folder, rank = sys.argv[1:]
if rank == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name in eval(os.environ["NAMES"]):
        open("/dev/shm/" + name.format(os.getpid()), "w").close()
    os.mkdir(folder + "/ready")
    time.sleep(600)
while not os.path.exists(folder + "/ready"):
    time.sleep(0.01)
os._exit(3)
"""
NAMES = (f"{{}}:{os.getuid()}:0", f"{REGISTERED}{{}}_{os.getuid()}")


@pytest.mark.parametrize("grace", [0.0, 0.5])
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period_and_leaves_nothing(tmp_path, monkeypatch, grace):
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, api

    from cpulaunch.launch.hosts.agent.ends import end_ranks_within

    monkeypatch.setattr(api.PContext, "close", api.PContext.close)
    end_ranks_within(grace)
    ranks = SubprocessContext(
        name="rank",
        entrypoint=sys.executable,
        args={rank: ("-c", RANK, str(tmp_path), str(rank)) for rank in range(2)},
        envs={rank: {"NAMES": repr(NAMES), "TORCHELASTIC_RUN_ID": "one"} for rank in range(2)},
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )
    ranks._start()  # Without torch's handlers of signals.
    pids = ranks.pids()
    eventually((tmp_path / "ready").exists, "a rank that ignores SIGTERM")
    begun = time.monotonic()
    failures = ranks.wait(period=0.01).failures
    seconds = time.monotonic() - begun
    left = [name for name in (each.format(pids[0]) for each in NAMES) if os.path.exists(f"{SHARED_FOLDER}/{name}")]
    for name in left:
        os.unlink(f"{SHARED_FOLDER}/{name}")
    assert ({rank: failure.exitcode for rank, failure in failures.items()}, left) == ({0: -9, 1: 3}, [])
    assert grace <= seconds < 20


def test_a_killed_rank_that_torch_gives_up_is_waited_for(monkeypatch):
    """Else it would be no failure, and its shared memory would stay."""
    from torch.distributed.elastic.multiprocessing import api

    from cpulaunch.launch.hosts.agent.ends import end_ranks_within

    monkeypatch.setattr(api.PContext, "close", lambda *_: None)
    killed = end_ranks_within(0.0)
    with subprocess.Popen(["/bin/sh", "-c", "sleep 0.3; kill -KILL $$"]) as rank:
        api.PContext.close(SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=rank, close=None)}))
        assert (rank.returncode, killed) == (-9, {rank.pid})


def test_the_begin_of_the_end_is_told_once_of_each_attempt(monkeypatch):
    """torch closes the ranks of the last one twice."""
    from torch.distributed.elastic.multiprocessing import api

    from cpulaunch.launch.hosts.agent.ends import end_ranks_within

    monkeypatch.setattr(api.PContext, "close", lambda *_: None)
    begun = []
    end_ranks_within(0.0, begin=lambda: begun.append(attempt))
    for attempt in range(2):
        context = SimpleNamespace(subprocess_handlers={}, number=attempt)
        api.PContext.close(context)
        api.PContext.close(context)
    assert begun == [0, 1]


TRACED_BY_THE_AGENT = """
import ctypes, os, signal
if ctypes.CDLL(None).ptrace(0, 0, None, None) == 0:  # Source: linux/ptrace.h, PTRACE_TRACEME.
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.skipif(not is_linux(), reason="other systems have no PTRACE_TRACEME")
def test_a_signal_while_ranks_are_ended_does_not_give_them_longer(monkeypatch):
    from torch.distributed.elastic.multiprocessing import api

    from cpulaunch.launch.hosts.agent import ends

    now, given = 100.0, []

    def close(context, death_sig, seconds):
        nonlocal now
        given.append(seconds)
        now += 20

    monkeypatch.setattr(ends, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(api.PContext, "close", close)
    ends.end_ranks_within(30.0)
    for attempt in range(2):
        context = SimpleNamespace(subprocess_handlers={}, number=attempt)
        for _ in range(3):
            api.PContext.close(context)
    assert given == [30.0, 10.0, ends.LEAST_SECONDS] * 2


def test_a_rank_of_which_torch_takes_a_stop_for_its_end_is_ended(monkeypatch):
    """Else one of its threads could go on beside the ranks of the next attempt."""
    from torch.distributed.elastic.multiprocessing import api

    from cpulaunch.launch.hosts.agent.ends import end_ranks_within

    monkeypatch.setattr(api.PContext, "close", lambda *_: None)
    end_ranks_within(0.0)
    rank = subprocess.Popen([sys.executable, "-c", TRACED_BY_THE_AGENT])
    if rank.wait() == 0:
        pytest.skip("no process may be traced here")
    api.PContext.close(SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=rank, close=None)}))
    assert not is_child(rank.pid)


def test_a_rank_that_may_not_be_signalled_keeps_no_other_from_its_signal(monkeypatch, capsys):
    """It runs a setuid program, and killpg(2) refuses."""
    from torch.distributed.elastic.multiprocessing import api

    from cpulaunch.launch.hosts.agent.ends import end_ranks_within

    def close_all(context, *_):
        for death_sig in (15, 9, 9):
            for handler in context.subprocess_handlers.values():
                handler.close(death_sig=death_sig)
            said.append(capsys.readouterr().err.count("process 1 "))

    def refuse(death_sig):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(api.PContext, "close", close_all)
    monkeypatch.setattr("cpulaunch.launch.hosts.agent.ends.is_refused", lambda pid: pid == 1)
    end_ranks_within(0.0)
    signalled, said = [], []

    def note(death_sig):
        signalled.append(death_sig)

    setuid = SimpleNamespace(pid=1, poll=lambda: None, returncode=None)
    ended = SimpleNamespace(pid=1 << 30, poll=lambda: 0, returncode=0)
    handlers = {
        0: SimpleNamespace(proc=setuid, close=refuse),
        1: SimpleNamespace(proc=ended, close=note),
    }
    closes = []
    for _ in range(2):
        api.PContext.close(SimpleNamespace(subprocess_handlers=handlers))
        closes.append([handler.close for handler in handlers.values()])
    assert signalled == [15, 9, 9] * 2
    assert said == [0, 1, 0, 0, 0, 0], "it may end by itself after SIGTERM"
    assert closes[0] == closes[1], "they are wrapped once, however often torch closes them"
    assert setuid.wait(600) is None, "it is not waited for again"
