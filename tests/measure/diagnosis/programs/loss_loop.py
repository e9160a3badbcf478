"""A training whose loss is added up element by element."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = torch.rand(128, 32), torch.rand(128, 1)


def loss_of(outputs, targets):
    total = outputs.new_zeros(())
    for row in range(len(outputs)):
        difference = outputs[row, 0] - targets[row, 0]
        total = total + difference * difference
    return total / len(outputs)


for _ in range(100_000):
    optimizer.zero_grad()
    loss_of(model(inputs), targets).backward()
    optimizer.step()
