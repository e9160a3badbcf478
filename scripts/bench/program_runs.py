"""The programs of program.py, and what one run of them prints."""

from __future__ import annotations

from dataclasses import dataclass

from commands import BenchError
from rates import parse_figures

PROGRAMS = (
    *("encoder", "t5", "llama", "whisper", "gpt2", "lstm", "resnet", "depthwise", "vit", "swin", "convnext", "clip"),
    *("unet", "dlrm", "mlp", "mlp_training", "bert_training"),
)
UNITS = ("samples/s", "tokens/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of a program printed: its rate, seconds to the first result, and comparison with eager fp32."""

    rate: float
    unit: str
    first_seconds: float
    error: float | None
    agreement: float | None


def parse_run(output: str) -> Run:
    """The figures in the output of program.py. Raises: BenchError if one that every run prints is missing."""
    rates = [(rate, unit) for unit in UNITS for _, rate in parse_figures(output, unit)]
    first = [seconds for name, seconds in parse_figures(output, "s") if name == "result"]
    errors, agreements = (
        [value for _, value in parse_figures(output, unit)] for unit in ("largest error", "agreement")
    )
    if len(rates) != 1 or len(first) != 1:
        raise BenchError(f"the program printed no rate:\n{output[-1000:]}")
    return Run(
        rate=rates[0][0],
        unit=rates[0][1],
        first_seconds=first[0],
        error=errors[0] if errors else None,
        agreement=agreements[0] if agreements else None,
    )
