"""An inference in bf16, whatever the CPU can do."""

import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).eval()
inputs = torch.rand(32, 512)
with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
    for _ in range(100_000):
        model(inputs)
