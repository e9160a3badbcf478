"""Programs that train: a small network on rows of numbers, and BERT on labelled texts."""

from __future__ import annotations

import torch
from models import TRAINING
from torch import Tensor, nn

from cases.program import Build, Program

BERT_BATCH, ROWS = 4, 64


def _mlp_training() -> Program:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    rows, labels = torch.randn(16 * ROWS, 64), torch.randint(0, 10, (16 * ROWS,))

    def step(number: int) -> Tensor:
        part = slice(number % 16 * ROWS, (number % 16 + 1) * ROWS)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows[part]), labels[part])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Program(step=step, amount=ROWS, training=True)


def _bert_training() -> Program:
    case = TRAINING["bert"](BERT_BATCH)
    model = case.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    texts, labels = case.inputs

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(texts, labels=labels).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Program(step=step, amount=BERT_BATCH, training=True)


TRAINED: dict[str, Build] = {"mlp_training": _mlp_training, "bert_training": _bert_training}
"""Name -> builder."""
