"""An inference that makes large tensors and drops them at once."""

import torch
from torch import nn


class Expanding(nn.Module):
    def forward(self, x):
        for _ in range(4):
            x = torch.zeros(12_000_000).narrow(0, 0, 64) + x
        return x


model = Expanding().eval()
inputs = torch.rand(64)
with torch.inference_mode():
    for _ in range(100_000):
        model(inputs)
