#!/usr/bin/env python3
"""Run one of six models in eager fp32 for a fixed time and print `NAME: 12.34 samples/s`.

An ordinary inference program: random weights from a fixed seed; it sets no threads, allocator or binding. --compile and
--autocast stand for edits by its author. `--rendezvous DIR --copies N` measures several copies at the same time: each
copy keeps warming up until all N are warm, so that the measured windows overlap and the rates may be added.
"""
# No `from __future__` here: ipexrun --auto-ipex inserts lines before the program's first one.

import argparse
import importlib
from pathlib import Path

import torch
from models import INFERENCE, SEED, Case
from outputs import count_gflop, largest_error, root_mean_square, tensors_of
from pacing import count_steps, warm_up


def compiled(model: torch.nn.Module, backend: str) -> torch.nn.Module:
    """The model compiled by torch.compile with frozen weights."""
    import torch._inductor.config  # Slow, so imported only for --compile.

    if backend != "inductor":
        importlib.import_module(backend)  # Registers the backend with torch.compile.

    torch._inductor.config.freezing = True
    return torch.compile(model, backend=backend)


def describe(name: str, case: Case, batch: int, file: Path) -> None:
    """Effect: writes the eager outputs to `file`; prints their root mean square and the operations per sample."""
    reference = tensors_of(case.model(*case.inputs))
    torch.save(reference, file)
    print(f"{name}: {root_mean_square(reference):.3e} rms")
    print(f"{name}: {count_gflop(case) / batch:.6g} GFLOP/sample", flush=True)


def run(name: str, case: Case, batch: int, options: argparse.Namespace) -> None:
    """Effect: warms up, measures, prints the rate and, with --reference, the largest error of the outputs."""
    model = compiled(case.model, options.compile) if options.compile else case.model
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.autocast == "bf16"):

        def step() -> object:
            return model(*case.inputs)

        warm_up(step, options.warmup, options.rendezvous, options.copies, seconds=options.warmup_seconds)
        steps, seconds = count_steps(step, options.seconds)
        print(f"{name}: {steps * batch / seconds:.2f} samples/s", flush=True)
        if options.reference:
            error = largest_error(tensors_of(step()), torch.load(options.reference))
            print(f"{name}: {error:.3e} largest error", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(INFERENCE))
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the measured window")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the measured window")
    parser.add_argument("--warmup-seconds", type=float, default=0.0, help="shortest time before the measured window")
    parser.add_argument("--batch", type=int, help="samples per step (default: depends on the model)")
    parser.add_argument("--compile", choices=["inductor", "zentorch"], help="torch.compile with frozen weights")
    parser.add_argument("--autocast", choices=["bf16"], help="run the model under torch.autocast")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="also print the largest error against FILE")
    parser.add_argument(
        "--describe", type=Path, metavar="FILE", help="only write the reference outputs to FILE and describe them"
    )
    parser.add_argument("--rendezvous", type=Path, help="empty folder through which copies wait for each other")
    parser.add_argument("--copies", type=int, default=1, help="copies that wait for each other")
    options = parser.parse_args()

    build, default_batch = INFERENCE[options.name]
    batch = options.batch or default_batch
    torch.manual_seed(SEED)
    case = build(batch)
    case.model.eval()
    with torch.no_grad():
        if options.describe:
            describe(options.name, case, batch, options.describe)
        else:
            run(options.name, case, batch, options)


if __name__ == "__main__":
    main()
