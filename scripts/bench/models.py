#!/usr/bin/env python3
"""Run one of six models in eager fp32 for a fixed time and print `NAME: 12.34 samples/s`.

An ordinary inference program: random weights under a fixed seed, nothing downloaded, no thread, allocator or binding
set. Several copies are measured at the same time with `--rendezvous DIR --copies N`: each goes on warming up until all
N are warm, so that every copy's measured window runs beside every other's and their rates may be added.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTModel,
)

SEED = 20
LAYERS = 6
TOKENS = 128
PATIENCE_SECONDS = 180

Step = Callable[[], object]


class Dlrm(nn.Module):
    """Recommender with the layer sizes of DLRM's Criteo recipe (dimension 64) and 26 tables of 100,000 rows."""

    TABLES, ROWS, DIMENSION, DENSE = 26, 100_000, 64, 13

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(self.ROWS, self.DIMENSION, mode="sum") for _ in range(self.TABLES))
        self.bottom = _dense_layers(self.DENSE, 512, 256, self.DIMENSION)
        features = self.TABLES + 1
        self.top = _dense_layers(self.DIMENSION + features * (features - 1) // 2, 512, 512, 256, 1)
        rows, columns = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        sparse = [bag(table, offsets) for bag, table in zip(self.bags, indices, strict=True)]
        features = torch.stack([bottom, *sparse], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.rows, self.columns]
        return torch.sigmoid(self.top(torch.cat([bottom, products], dim=1)))


def _dense_layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)))


def _bert(batch: int) -> Step:
    model = BertModel(BertConfig(num_hidden_layers=LAYERS)).eval()
    tokens = torch.randint(0, 30_000, (batch, TOKENS))
    return lambda: model(input_ids=tokens)


def _resnet50(batch: int) -> Step:
    model = ResNetForImageClassification(ResNetConfig()).eval()
    image = torch.randn(batch, 3, 224, 224)
    return lambda: model(pixel_values=image)


def _vit(batch: int) -> Step:
    model = ViTModel(ViTConfig(num_hidden_layers=LAYERS)).eval()
    image = torch.randn(batch, 3, 224, 224)
    return lambda: model(pixel_values=image)


def _gpt2(batch: int) -> Step:
    model = GPT2Model(GPT2Config(n_layer=LAYERS)).eval()
    prompt = torch.randint(0, 50_000, (batch, TOKENS))
    return lambda: model(input_ids=prompt)


def _dlrm(batch: int) -> Step:
    model = Dlrm().eval()
    dense = torch.randn(batch, Dlrm.DENSE)
    indices = torch.randint(0, Dlrm.ROWS, (Dlrm.TABLES, batch))
    offsets = torch.arange(batch)
    return lambda: model(dense, indices, offsets)


def _mlp(batch: int) -> Step:
    model = _dense_layers(*[512] * 9).eval()
    features = torch.randn(batch, 512)
    return lambda: model(features)


MODELS: dict[str, tuple[Callable[[int], Step], int]] = {
    "bert": (_bert, 1),
    "resnet50": (_resnet50, 1),
    "vit": (_vit, 1),
    "gpt2": (_gpt2, 1),
    "dlrm": (_dlrm, 128),
    "mlp": (_mlp, 1),
}
"""Name -> (builder, default batch size)."""


def count_steps(step: Step, seconds: float) -> tuple[int, float]:
    """Steps run until `seconds` have passed, and the seconds they took."""
    start = time.perf_counter()
    count = 0
    while True:
        step()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return count, elapsed


def warm_up(step: Step, steps: int, rendezvous: Path | None, copies: int) -> None:
    """Effect: runs at least `steps` steps, and goes on until `copies` copies have met in `rendezvous`."""
    for _ in range(steps):
        step()
    if rendezvous is None:
        return
    (rendezvous / str(os.getpid())).touch()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(rendezvous.iterdir())) < copies:
        if time.monotonic() > deadline:
            sys.exit(f"error: fewer than {copies} copies came to {rendezvous} within {PATIENCE_SECONDS} s")
        count_steps(step, 0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the measured window")
    parser.add_argument("--warmup", type=int, default=5, help="steps before it")
    parser.add_argument("--batch", type=int, help="samples per step; the model's own default otherwise")
    parser.add_argument("--rendezvous", type=Path, help="empty folder in which copies meet before they measure")
    parser.add_argument("--copies", type=int, default=1, help="copies that meet there")
    options = parser.parse_args()

    build, default_batch = MODELS[options.name]
    batch = options.batch or default_batch
    torch.manual_seed(SEED)
    with torch.no_grad():
        step = build(batch)
        warm_up(step, options.warmup, options.rendezvous, options.copies)
        steps, seconds = count_steps(step, options.seconds)
    print(f"{options.name}: {steps * batch / seconds:.2f} samples/s", flush=True)


if __name__ == "__main__":
    main()
