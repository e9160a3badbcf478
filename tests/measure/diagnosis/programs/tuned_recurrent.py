"""A training of an LSTM, whose layers each are one operation."""

import torch
from torch import nn

recurrent, head = nn.LSTM(256, 384, batch_first=True), nn.Linear(384, 100)
optimizer = torch.optim.AdamW([*recurrent.parameters(), *head.parameters()], fused=True)
inputs, targets = torch.randn(64, 16, 256), torch.randint(0, 100, (64 * 16,))
while True:
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(recurrent(inputs)[0]).flatten(0, 1), targets).backward()
    optimizer.step()
