"""An evaluation that reads its results one number at a time."""

import torch
from torch import nn

model = nn.Linear(32, 10).eval()
inputs = torch.rand(256, 32)
right = 0
with torch.no_grad():
    for _ in range(10_000):
        scores = model(inputs)
        for row in range(256):
            if max(scores[row, number].item() for number in range(10)) > 0.5:
                right += 1
