"""Settings of torch that change how oneDNN computes: part of a graph's key, and the same in the helper process."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

PRECISIONS = (("generic", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"))
"""The backends and operations whose precision of fp32 may be set. Source: torch/backends/__init__.py (torch 2.9)."""

FLAGS = ("enabled", "deterministic")
"""Of torch.backends.mkldnn, as far as this torch has them."""


def math_settings() -> dict[str, Any]:
    """The settings in force, as values for JSON."""
    precision: str | None = None
    with suppress(RuntimeError):  # torch refuses to answer where a program has set precisions by the new names only.
        precision = torch.get_float32_matmul_precision()
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    return {
        "default_type": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul": precision,
        "fp32": [] if get is None else [get(*names) for names in PRECISIONS],
        "flags": {name: getattr(torch.backends.mkldnn, name) for name in FLAGS if hasattr(torch.backends.mkldnn, name)},
    }


def apply_math_settings(settings: dict[str, Any]) -> None:
    """Effect: puts the settings of another process in force."""
    torch.set_default_dtype(getattr(torch, settings["default_type"]))
    if settings["matmul"] is not None:
        torch.set_float32_matmul_precision(settings["matmul"])
    for names, value in zip(PRECISIONS, settings["fp32"], strict=False):
        torch._C._set_fp32_precision_setter(*names, value)
    for name, value in settings["flags"].items():
        setattr(torch.backends.mkldnn, name, value)
