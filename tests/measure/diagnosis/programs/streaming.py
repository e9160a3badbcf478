"""Tokens that a generator yields, each after a computation in Python on what the model said."""

import random

import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.head = nn.Linear(64, 1000)

    def forward(self, token):
        return self.head(self.embedding(token))


def generated(model, token):
    while True:
        scores = model(torch.tensor([token]))[0].tolist()
        best = sorted(range(len(scores)), key=lambda number: -scores[number])
        weights = [2.718 ** scores[number] for number in best]
        token = random.choices(best, weights)[0]
        yield token


model = Model().eval()
with torch.inference_mode():
    for _ in generated(model, 1):
        pass
