"""A DDP job for tests: `train_job.py DIRECTORY [STEPS]`. Without STEPS it trains until DIRECTORY/stop exists.

Every rank prints a JSON line at its end; after its first step it adds one to DIRECTORY/progress. Rank 0 keeps a
checkpoint there.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

directory = Path(sys.argv[1])
steps = int(sys.argv[2]) if len(sys.argv) > 2 else None
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(rank)
inner = torch.nn.Linear(8, 1)
checkpoint = directory / "checkpoint.pt"
if checkpoint.exists():
    inner.load_state_dict(torch.load(checkpoint))
model = DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
truth = torch.arange(8.0)


def mean_loss():
    """The loss of this step over all ranks. Effect: one step is made."""
    inputs = torch.randn(64, 8)
    loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), inputs @ truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / world


def stopping():
    flag = torch.tensor([float((directory / "stop").exists())])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def facts():
    return {
        "rank": rank,
        "world": world,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "cpus": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "run": os.environ["CPULAUNCH_TEST_MARK"],
        "pid": os.getpid(),
    }


first = last = None
made = 0
while made < steps if steps is not None else not stopping():
    last = mean_loss()
    made += 1
    if first is None:
        first = last
        with (directory / "progress").open("a") as file:
            file.write(json.dumps(facts()) + "\n")
    if rank == 0 and made % 20 == 0:
        torch.save(inner.state_dict(), directory / "new.pt")
        (directory / "new.pt").rename(checkpoint)

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
result = {**facts(), "first": first, "last": last, "weights": [round(w, 5) for w in weights.tolist()]}
print(json.dumps(result), flush=True)
dist.destroy_process_group()
# As Python ends, a thread of gloo's that lets go of its last tensor aborts the process now and then (torch 2.13):
# https://github.com/pytorch/pytorch/pull/179291. What Python would still do is not what is tested here.
os._exit(0)
