"""An inference with many more threads than CPUs."""

import os

import torch
from torch import nn

torch.set_num_threads(8 * (os.cpu_count() or 1))
model = nn.Sequential(*[nn.Linear(768, 768) for _ in range(4)]).eval()
inputs = torch.rand(128, 768)
with torch.inference_mode():
    for _ in range(100_000):
        model(inputs)
