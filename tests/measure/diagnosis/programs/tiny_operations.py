"""A model of many small layers, one after the other."""

import torch
from torch import nn


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(200))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.1 * x
        return x


model = Narrow().eval()
inputs = torch.rand(4, 8)
with torch.inference_mode():
    for _ in range(100_000):
        model(inputs)
