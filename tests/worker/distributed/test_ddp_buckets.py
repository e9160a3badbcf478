"""The size of DistributedDataParallel's buckets: set where the program leaves it to torch, kept where it chooses."""

import json
import os
import subprocess
import sys

import pytest

from cpulaunch.records.torch_settings import VARIABLE, TorchSettings, encode

pytestmark = pytest.mark.torch

PROGRAM = """
import json, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
class Own(DistributedDataParallel):
    def __init__(self, module):
        super().__init__(module, bucket_cap_mb=None)
sizes = [
    build(torch.nn.Linear(4, 4)).bucket_bytes_cap >> 20
    for build in (
        DistributedDataParallel,
        Own,
        lambda module: DistributedDataParallel(module, bucket_cap_mb=7),
        lambda module: DistributedDataParallel(module, None, None, 0, True, True, None, 9),
    )
]
print(json.dumps(sizes))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("size", "left_to_torch"), [(None, 25), (5, 5)])
def test_what_the_program_leaves_to_torch_is_set(tmp_path, size, left_to_torch):
    pytest.importorskip("torch")
    settings = encode(TorchSettings(ddp_bucket_mb=size))
    environ = {**os.environ, VARIABLE: settings}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(ran.stdout) == [left_to_torch, left_to_torch, 7, 9]
