"""The commands under test, and how their processes are watched."""

import subprocess
import sys
import time

import pytest
from peers import PEERS, BenchError, Command, Peer, end, run_peer, start
from process_tree import kill_tree, split_tree
from resident import parse_peak_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benches read /proc")


def _python(code: str, **env: str) -> Command:
    return Command(argv=(sys.executable, "-c", code), env=env)


@pytest.mark.parametrize(("name", "copies"), [("python", 1), ("cpulaunch-1", 1), ("cpulaunch", 2), ("torchrun", 2)])
def test_peers_start_the_program_with_its_arguments(name: str, copies: int) -> None:
    peer = PEERS[name](["noop.py", "--size", "3"], 2)
    assert peer.copies == copies
    assert peer.commands[0].argv[-3:] == ("noop.py", "--size", "3")


def test_command_is_printed_as_it_could_be_typed() -> None:
    assert str(Command(argv=("python", "a b.py"), env={"OMP_NUM_THREADS": "1"})) == "OMP_NUM_THREADS=1 python 'a b.py'"


def test_output_of_all_commands_is_returned() -> None:
    peer = Peer(commands=(_python("print('one')"), _python("import os; print(os.environ['X'])", X="two")), copies=2)
    assert sorted(run_peer(peer).split()) == ["one", "two"]


def test_first_failure_ends_the_others_and_is_quoted() -> None:
    begin = time.monotonic()
    peer = Peer(commands=(_python("import time; time.sleep(600)"), _python("raise SystemExit('no luck')")), copies=2)
    with pytest.raises(BenchError, match="no luck"):
        run_peer(peer)
    assert time.monotonic() - begin < 300


def test_missing_program_is_named() -> None:
    with pytest.raises(BenchError, match="cannot start: no-such-program"):
        run_peer(Peer(commands=(Command(argv=("no-such-program",)),), copies=1))


def test_leaves_of_the_process_tree_are_the_workers() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    process = start(_python(code), output=subprocess.DEVNULL, errors=subprocess.DEVNULL)
    try:
        while not (tree := split_tree(process.pid))[1]:
            assert process.poll() is None
        assert tree[0] == [process.pid]
        assert len(tree[1]) == 1
    finally:
        kill_tree(process.pid)
        process.wait()


def test_a_launcher_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.GRACE_SECONDS", 0.2)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    process = start(_python(code), output=subprocess.PIPE, errors=subprocess.DEVNULL)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        end(process)
    assert process.returncode == -9


def test_peak_memory_is_in_bytes() -> None:
    assert parse_peak_bytes("Name:\tx\nVmHWM:\t   15000 kB\nVmRSS:\t 9 kB\n") == 15000 * 1024
    with pytest.raises(BenchError, match="VmHWM"):
        parse_peak_bytes("Name:\tx\n")
