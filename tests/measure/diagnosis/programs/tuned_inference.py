"""An inference that mostly multiplies matrices."""

import torch
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(inplace=True)) for _ in range(4)]).eval()
inputs = torch.rand(512, 1024)
with torch.inference_mode():
    for _ in range(100_000):
        model(inputs)
