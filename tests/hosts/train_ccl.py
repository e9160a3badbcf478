"""The same DDP job over the backend "ccl" and over gloo: every rank prints a JSON line with both rows of losses."""

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, WIDTH = 5, 64
RECEIVED = Path("/sys/class/net/up0/statistics/rx_bytes")


def losses(group):
    """The losses of this rank, step by step."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        inputs = torch.randn(32, WIDTH)
        loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), inputs.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def received_bytes(tensor):
    """What comes in over the network while a tensor is reduced."""
    before = int(RECEIVED.read_text())
    dist.all_reduce(tensor)
    return int(RECEIVED.read_text()) - before


torch.set_num_threads(1)
dist.init_process_group("ccl", timeout=timedelta(seconds=120))
tensor = torch.full((1 << 18,), float(dist.get_rank()))
report = {
    "rank": dist.get_rank(),
    "local_rank": int(os.environ["LOCAL_RANK"]),
    "received": received_bytes(tensor) if RECEIVED.exists() else 0,
    "sum": tensor.unique().tolist(),
    "ccl": losses(None),
    "gloo": losses(dist.new_group(backend="gloo")),
}
print(json.dumps(report), flush=True)
dist.destroy_process_group()
# As Python ends, a thread of gloo's aborts the process now and then: see train_job.py.
os._exit(0)
