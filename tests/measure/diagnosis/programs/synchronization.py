"""An evaluation that reads its results one number at a time."""

import torch
from torch import nn

model = nn.Linear(32, 10).eval()
inputs = torch.rand(512, 32)
right = 0
with torch.no_grad():
    for _ in range(10_000):
        classes = model(inputs).argmax(1)
        for row in range(512):
            if classes[row].item() == row % 10:
                right += 1
