"""A training with samples in memory and a fused optimizer."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
inputs, targets = torch.rand(4096, 768), torch.randint(10, (4096,))
for number in range(100_000):
    rows = slice(number % 4 * 1024, number % 4 * 1024 + 1024)
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
    optimizer.step()
