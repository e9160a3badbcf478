"""A program that is bound by its DataLoader: two loader workers decode samples for a small model."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

SAMPLES = 640
BATCH = 16
WARM_UP_BATCHES = 8
STEPS = 10_000
"""Iterations of a Python loop for each sample: about 1 ms, like decoding and augmentation."""


class Decoded(Dataset[torch.Tensor]):
    """Samples that take processor time to produce."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        value = index
        for _ in range(STEPS):
            value = (value * 1103515245 + 12345) % 2147483648
        return torch.full((128,), float(value % 1000))


def main(method: str) -> None:
    model = torch.nn.Linear(128, 128)
    model(torch.zeros(2048, 128))  # The first parallel region, in which an OpenMP runtime pins the threads.
    loader = DataLoader(Decoded(), batch_size=BATCH, num_workers=2, multiprocessing_context=method)
    start = 0.0
    for number, batch in enumerate(loader, 1):
        model(batch)
        if number == WARM_UP_BATCHES:
            start = time.perf_counter()
    seconds = time.perf_counter() - start
    print(f"loading: {(SAMPLES - WARM_UP_BATCHES * BATCH) / seconds:.1f} samples/s")


if __name__ == "__main__":
    main(sys.argv[1])
