"""On a machine with an NVIDIA GPU: a rank sees its GPU and runs on the cores next to it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.probe import Root, probe_host
from cpulaunch.records.cpulist import parse_cpulist
from tests import json_output

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no NVIDIA GPU here (no /dev/nvidiactl)")

RANK = """
import ctypes, json, os

cuda = ctypes.CDLL("libcuda.so.1")
count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(64)
codes = [cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), cuda.cuDeviceGet(ctypes.byref(device), 0)]
codes.append(cuda.cuDeviceGetPCIBusId(name, 64, device))
print(json.dumps({
    "codes": codes, "count": count.value, "pci": name.value.decode().lower(), "cpus": sorted(os.sched_getaffinity(0)),
    "rank": os.environ["RANK"], "local_rank": os.environ["LOCAL_RANK"], "world_size": os.environ["WORLD_SIZE"],
}))
"""


def cpulaunch(*words: str, visible: str) -> Any:
    """What a command prints, as JSON, where CUDA may show these devices."""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", *words],
        env=environ | {"CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return str(path)


@pytest.mark.parametrize("flags", [(), ("--virtual-local-rank",)], ids=["whole", "virtual"])
def test_a_rank_sees_its_gpu_and_its_near_cores(program: str, flags: tuple[str, ...]) -> None:
    words = ("plan", "--json", "--nproc-per-node", "gpu", *flags, program)
    planned = json_output.checked("plan", cpulaunch(*words, visible="0"))
    seen = cpulaunch("--nproc-per-node", "gpu", *flags, program, visible="0")
    (worker,) = planned["workers"]
    host = probe_host(Root())
    gpu = host.gpus[worker["gpu"]]
    assert (seen["codes"], seen["count"]) == ([0, 0, 0, 0], 1)
    assert int(seen["pci"].split(":")[0], 16) == int(gpu.pci.split(":")[0], 16)
    assert seen["pci"].split(":")[1:] == gpu.pci.split(":")[1:]
    assert (seen["rank"], seen["local_rank"], seen["world_size"]) == ("0", "0", "1")
    cpus = frozenset(seen["cpus"])
    assert cpus == (parse_cpulist(worker["cpus"]) or host.limits.affinity)
    near = gpu.cpus & host.limits.budget.cpus
    assert not near or cpus <= near
