"""Functions that the program's own torch.compile is not to trace."""

from __future__ import annotations

from typing import Any

import torch

_frames: Any = torch._C._dynamo.eval_frame


def hide_from_dynamo(function: Any) -> None:
    """Effect: the program's own torch.compile skips this function and compiles what it calls."""
    if hasattr(_frames, "skip_code"):  # torch 2.5
        _frames.skip_code(function.__code__)
    elif hasattr(_frames, "set_code_exec_strategy"):
        skip, default = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, default))
