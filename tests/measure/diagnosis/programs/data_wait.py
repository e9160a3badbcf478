"""A training whose samples come from a slow disk: the main process waits for each."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class SlowFiles(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.004)  # What a read from a network file system takes.
        return torch.rand(64), torch.rand(1)


model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, targets in DataLoader(SlowFiles(), batch_size=8):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
