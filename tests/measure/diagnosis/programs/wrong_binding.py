"""An inference whose threads have all been bound to one CPU."""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import torch  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(2)
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).eval()
inputs = torch.rand(256, 1024)
with torch.inference_mode():
    for _ in range(100_000):
        model(inputs)
