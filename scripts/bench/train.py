#!/usr/bin/env python3
"""Train BERT (4 layers) or ResNet-50 on synthetic data and print `NAME: 12.34 samples/s`, or a loss with --losses.

An ordinary fp32 training program: it sets no threads, allocator or binding; --autocast stands for an edit by its
author. Weights and data are always the same; --seed determines the order of the batches and the dropout.
"""

import argparse
from collections.abc import Iterator
from itertools import islice

import torch
from models import SEED, TRAINING, Case
from pacing import count_steps, warm_up

BATCHES = 10
"""Number of batches in the data; the printed loss is the mean over the last pass."""


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "bert":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batches(case: Case, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """An endless series of batches: passes over the data, each in a new order."""
    samples, labels = (tensor.split(batch) for tensor in case.inputs)
    while True:
        for index in torch.randperm(BATCHES).tolist():
            yield samples[index], labels[index]


def losses(name: str, case: Case, options: argparse.Namespace) -> Iterator[float]:
    """The loss of each training step, without end."""
    optimizer = make_optimizer(name, case.model)
    for samples, labels in batches(case, options.batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.autocast == "bf16"):
            loss = case.model(samples, labels=labels).loss
        loss.backward()
        optimizer.step()
        yield loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(TRAINING))
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the measured window")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measured window")
    parser.add_argument("--batch", type=int, default=4, help="samples per step")
    parser.add_argument("--autocast", choices=["bf16"], help="compute the loss under torch.autocast")
    parser.add_argument("--seed", type=int, default=0, help="seed of the batch order and of dropout")
    parser.add_argument(
        "--losses", type=int, metavar="STEPS", help="train STEPS steps and print the mean loss of the last pass"
    )
    options = parser.parse_args()

    torch.manual_seed(SEED)
    case = TRAINING[options.name](BATCHES * options.batch)
    case.model.train()
    torch.manual_seed(options.seed)
    training = losses(options.name, case, options)
    if options.losses:
        last = list(islice(training, options.losses))[-BATCHES:]
        print(f"{options.name}: {sum(last) / len(last):.6e} loss", flush=True)
        return
    warm_up(lambda: next(training), options.warmup, None, 1)
    steps, seconds = count_steps(lambda: next(training), options.seconds)
    print(f"{options.name}: {steps * options.batch / seconds:.2f} samples/s", flush=True)


if __name__ == "__main__":
    main()
