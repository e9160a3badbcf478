"""Measures generation: the same steps for a program of transformers and for llama.cpp."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from llama_shape import NEW_TOKENS, PREFILL_TOKENS, PROMPT_TOKENS
from pacing import count_steps, warm_up

Generate = Callable[[int, int], object]
"""Generates that many tokens (second number) from a prompt of that many tokens (first number)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Effect: adds the arguments of `measure`."""
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measured window")
    parser.add_argument(
        "--warmup-seconds", type=float, default=10.0, help="shortest warm-up of decoding; half of it for the prompt"
    )
    parser.add_argument("--rendezvous", type=Path, help="empty folder through which copies wait for each other")
    parser.add_argument("--copies", type=int, default=1, help="copies that wait for each other")


def measure(generate: Generate, options: argparse.Namespace) -> None:
    """Effect: measures, and prints tokens/s of decoding and of reading a prompt.

    Decoding is the time of a whole generation without that of its first token, which includes reading the prompt.
    """
    count_steps(lambda: generate(PROMPT_TOKENS, NEW_TOKENS), options.warmup_seconds)
    count_steps(lambda: generate(PREFILL_TOKENS, 1), options.warmup_seconds / 2)  # Its modes are tried of their own.
    warm_up(lambda: generate(PREFILL_TOKENS, 1), 2, options.rendezvous, options.copies)
    whole = _seconds(lambda: generate(PROMPT_TOKENS, NEW_TOKENS), options.seconds)
    first = _seconds(lambda: generate(PROMPT_TOKENS, 1), options.seconds / 4)
    prefill = _seconds(lambda: generate(PREFILL_TOKENS, 1), options.seconds / 2)
    if whole <= first:
        sys.exit(f"error: {NEW_TOKENS} tokens took {whole:.3g} s, the first one alone {first:.3g} s: too much noise")
    print(f"llama: {(NEW_TOKENS - 1) / (whole - first):.2f} tokens/s decode")
    print(f"llama: {PREFILL_TOKENS / prefill:.2f} tokens/s prefill", flush=True)


def _seconds(step: Callable[[], object], window: float) -> float:
    """Seconds of a step, averaged over a window."""
    steps, seconds = count_steps(step, window)
    return seconds / steps
