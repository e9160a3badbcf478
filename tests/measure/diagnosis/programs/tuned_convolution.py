"""An inference of a convolutional network in channels_last order."""

import torch
from torch import nn

layers = [nn.Conv2d(3, 64, 3, padding=1), *[nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)]]
model = nn.Sequential(*layers).eval().to(memory_format=torch.channels_last)
inputs = torch.rand(8, 3, 64, 64).to(memory_format=torch.channels_last)
with torch.inference_mode():
    for _ in range(100_000):
        model(inputs)
