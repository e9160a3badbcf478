"""Where all ranks are on this host, the stores of torch and of its agent listen on loopback only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 answers on Linux only")

UNEDITED = '''\
import os, subprocess, sys
import torch
import torch.distributed as dist

STRANGER = """
import os, socket, sys
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
try:
    socket.socket().connect(("127.0.0.2", int(sys.argv[1])))
    print("stranger: connected", flush=True)
except OSError as error:
    print(f"stranger: {error.strerror}", flush=True)
"""
init = sys.argv[1].replace("PORT", os.environ["MASTER_PORT"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
ones = torch.ones(1)
dist.all_reduce(ones)
if dist.get_rank() == 0:
    print(f"sum {ones.item():g} at {os.environ['MASTER_ADDR']}", flush=True)
    # Another user, who reaches this host at another of its addresses.
    subprocess.run([sys.executable, "-I", "-S", "-c", STRANGER, os.environ["MASTER_PORT"]])
dist.barrier()
dist.destroy_process_group()
'''


def run(tmp_path: Path, *options: str, init: str = "env://", **environ: str) -> str:
    (tmp_path / "train.py").write_text(UNEDITED)
    command = [sys.executable, "-P", "-m", "cpulaunch", *options, str(tmp_path / "train.py"), init]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


JOBS = {
    "env://": (("--nproc-per-node", "2"), "env://"),
    "an explicit address": (("--nproc-per-node", "2"), "tcp://127.0.0.1:PORT"),
    "an explicit name": (("--nproc-per-node", "2"), "tcp://localhost:PORT"),
    "standalone": (("--standalone", "--nproc-per-node", "2"), "env://"),
    "torch's agent": (("--nproc-per-node", "2", "--event-log-handler", "console"), "env://"),
}


@pytest.mark.parametrize(("options", "init"), JOBS.values(), ids=JOBS.keys())
def test_strangers_reach_no_store_of_a_job_on_one_host(tmp_path: Path, options: tuple[str, ...], init: str) -> None:
    output = run(tmp_path, *options, init=init)
    assert "sum 2 at " in output
    assert "stranger: Connection refused" in output


RPC = """\
import os
import torch
from torch.distributed import rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
if rank == 0:
    print("over", os.environ["TP_SOCKET_IFNAME"], rpc.rpc_sync("rank1", torch.add, args=(torch.ones(1), 1)).item())
rpc.shutdown()
"""


def test_calls_from_rank_to_rank_pass_over_loopback(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(RPC)
    command = [sys.executable, "-P", "-m", "cpulaunch", "--nproc-per-node", "2", str(tmp_path / "calls.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "over lo 2.0\n"), done.stderr


def test_the_old_backend_of_the_store_listens_on_loopback_too(tmp_path: Path) -> None:
    assert "stranger: Connection refused" in run(tmp_path, "--nproc-per-node", "2", USE_LIBUV="0")


def test_without_the_plugin_the_job_runs_as_before(tmp_path: Path) -> None:
    output = run(tmp_path, "--nproc-per-node", "2", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "sum 2 at " in output
