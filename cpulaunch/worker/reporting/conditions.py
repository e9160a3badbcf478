"""What inside torch makes a program slow without a word: breaks in compiled graphs, and a precision without kernels."""

from __future__ import annotations

import sys

from cpulaunch.records.torch_settings import TorchSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_REASONS = 5
MOST_LETTERS = 200


def conditions(settings: TorchSettings) -> dict[str, Any]:
    """{"graph_breaks": {reason: count}, "slow_precision": name}, as far as there are any."""
    found: dict[str, Any] = {}
    breaks = _graph_breaks()
    if breaks:
        found["graph_breaks"] = breaks
    if settings.precision in ("bf16", "fp16") and not _has_kernels(settings.precision):
        found["slow_precision"] = settings.precision
    return found


def _graph_breaks() -> dict[str, int]:
    """The reasons for which torch.compile broke graphs in this process, most frequent first."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    counts = dict(counters.get("graph_break", {})) if counters else {}
    ordered = sorted(counts.items(), key=lambda item: -item[1])[:MOST_REASONS]
    return {str(reason)[:MOST_LETTERS]: int(count) for reason, count in ordered}


def _has_kernels(precision: str) -> bool:
    """Whether oneDNN has kernels for products of this type on this CPU. Unknown counts as yes.

    Source: torch/_inductor/mkldnn_ir.py and torch/_inductor/config.py use the same functions.
    """
    torch = sys.modules.get("torch")
    operations = getattr(getattr(torch, "ops", None), "mkldnn", None)
    name = f"_is_mkldnn_{precision}_supported"
    supported = getattr(operations, name, None)
    return True if supported is None else bool(supported())
