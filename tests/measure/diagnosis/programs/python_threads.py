"""A training beside which six threads of Python's multiply matrices."""

import threading

import torch
from torch import nn


def multiply():
    matrix = torch.rand(400, 400)
    while True:
        matrix = (matrix @ matrix).clamp_(0, 1)


for _ in range(6):
    threading.Thread(target=multiply, daemon=True).start()
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = torch.rand(256, 512), torch.randint(0, 10, (256,))
while True:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
