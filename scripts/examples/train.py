"""An ordinary distributed training program: a small transformer learns to reverse sequences, on synthetic data.

It does not use cpulaunch and runs under torchrun too: it reads the variables that both launchers set and wraps its
model in DistributedDataParallel. Rank 0 prints the loss. Without a launcher it trains in one process.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SYMBOLS, LENGTH, WIDTH = 32, 24, 128


class Reverser(nn.Module):
    """Predicts, for each position of a sequence, the symbol that the reversed sequence has there."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Scores. Shape: (sequences, positions, symbols)."""
        return self.head(self.layers(self.symbols(sequences) + self.positions))


def batches(rank: int, size: int, steps: int) -> list[torch.Tensor]:
    """The batches of this rank; other ranks get other sequences."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [torch.randint(SYMBOLS, (size, LENGTH), generator=generator) for _ in range(steps)]


def train(model: nn.Module, data: list[torch.Tensor], *, rank: int) -> float:
    """The last loss of this rank. Effect: trains the model; rank 0 prints its progress."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = time.perf_counter()
    for step, sequences in enumerate(data, start=1):
        scores = model(sequences)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), sequences.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            speed = step * len(sequences) / (time.perf_counter() - start)
            print(f"step {step}: loss {loss.item():.4f}, {speed:.0f} samples/s on this rank")
    return loss.item()


def main() -> None:
    """Effect: joins the job if a launcher started one, trains, and prints the mean loss on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--batch", type=int, default=32, help="sequences of each rank in a step")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    launched = "RANK" in os.environ
    if launched:
        dist.init_process_group(options.backend)
    rank = dist.get_rank() if launched else 0
    torch.manual_seed(0)
    model = DistributedDataParallel(Reverser()) if launched else Reverser()
    loss = torch.tensor(train(model, batches(rank, options.batch, options.steps), rank=rank))
    if launched:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    if rank == 0:
        print(f"mean loss of {dist.get_world_size() if launched else 1} ranks: {loss.item():.4f}")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
