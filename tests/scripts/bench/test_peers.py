"""The commands under test, and their processes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import BenchError, Command, Peer, end, run_peer, start
from peers import PEERS, BenchContext, Recipe, missing_peers, modified_program, with_flags
from process_tree import kill_tree, split_tree
from resident import parse_peak_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benches read /proc")


def _python(code: str, **env: str) -> Command:
    return Command(argv=(sys.executable, "-c", code), env=env)


TWO = BenchContext(instances=2, folder=Path("/cache"))
PROGRAM = ["noop.py", "--size", "3"]


def _line(recipe: Recipe) -> str:
    """The only command of a recipe, without the folder of its program."""
    (command,) = recipe.launch(PROGRAM, TWO).commands
    return " ".join([Path(command.argv[0]).name, *command.argv[1:]])


@pytest.mark.parametrize(
    ("name", "copies", "line"),
    [
        ("run_cpu", 2, "-m torch.backends.xeon.run_cpu --ninstances 2 noop.py --size 3"),
        ("torchrun", 2, "torchrun --standalone --nproc-per-node 2 noop.py --size 3"),
        ("inductor", 1, "noop.py --size 3 --compile inductor"),
        ("zentorch-bf16", 1, "noop.py --size 3 --compile zentorch --autocast bf16"),
        ("ipexrun", 2, "ipexrun --ninstances 2 --auto-ipex --dtype bfloat16 noop.py --size 3"),
        ("ipexrun-1", 1, "ipexrun --ninstances 1 --auto-ipex --dtype bfloat16 noop.py --size 3"),
        ("cpulaunch", 2, "cpulaunch --instances 2 noop.py --size 3"),
        ("cpulaunch-1", 1, "cpulaunch noop.py --size 3"),
        ("cpulaunch-graph", 2, "cpulaunch --instances 2 --graph onednn noop.py --size 3"),
        ("cpulaunch-bf16-1", 1, "cpulaunch --graph onednn --precision bf16 noop.py --size 3"),
    ],
)
def test_peers_start_the_program_with_its_arguments(name: str, copies: int, line: str) -> None:
    assert PEERS[name].launch(PROGRAM, TWO).copies == copies
    assert _line(PEERS[name]).endswith(line)


def test_precision_follows_from_the_flags() -> None:
    assert {name for name, recipe in PEERS.items() if recipe.precision == "bf16"} == {
        name for name in PEERS if "bf16" in name or name.startswith("ipexrun")
    }
    assert modified_program("--autocast", "bf16").precision == with_flags("--precision", "bf16").precision == "bf16"
    assert modified_program().precision == with_flags("--graph", "onednn").precision == "fp32"


def test_a_bench_adds_variants_of_its_own() -> None:
    assert _line(with_flags("--channels-last")) == "cpulaunch --channels-last noop.py --size 3"
    assert _line(modified_program("--autocast", "bf16")).endswith("noop.py --size 3 --autocast bf16")


def test_other_environments_are_used_as_if_activated() -> None:
    (command,) = PEERS["ipexrun"].launch(PROGRAM, TWO).commands
    assert command.argv[0] == "/cache/ipex/bin/ipexrun"
    assert command.env == {"VIRTUAL_ENV": "/cache/ipex"}


def test_missing_environments_are_named_with_the_command_that_installs_them(tmp_path: Path) -> None:
    (tmp_path / "ipex").mkdir()
    (tmp_path / "ipex" / "ready").touch()
    assert missing_peers(["python", "ipexrun", "zentorch"], tmp_path) == {
        "zentorch": f"scripts/bench/setup-peers --folder {tmp_path} zentorch"
    }


def test_a_command_is_printed_as_a_shell_line() -> None:
    assert str(Command(argv=("python", "a b.py"), env={"OMP_NUM_THREADS": "1"})) == "OMP_NUM_THREADS=1 python 'a b.py'"


def test_output_of_all_commands_is_returned() -> None:
    peer = Peer(commands=(_python("print('one')"), _python("import os; print(os.environ['X'])", X="two")), copies=2)
    assert sorted(run_peer(peer).split()) == ["one", "two"]


def test_first_failure_ends_the_others_and_is_quoted() -> None:
    begin = time.monotonic()
    peer = Peer(
        commands=(_python("import time; time.sleep(600)"), _python("raise SystemExit('failed on purpose')")), copies=2
    )
    with pytest.raises(BenchError, match="failed on purpose"):
        run_peer(peer)
    assert time.monotonic() - begin < 300


def test_a_command_that_does_not_end_is_killed() -> None:
    peer = Peer(commands=(_python("print('up', flush=True); import time; time.sleep(600)"),), copies=1)
    with pytest.raises(BenchError, match=r"not finished after 0.5 s: .*sleep"):
        run_peer(peer, timeout_seconds=0.5)


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
    monkeypatch.setattr("commands.GRACE_SECONDS", 0.2)
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
